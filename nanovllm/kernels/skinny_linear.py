"""Products of a few rows, up to sixteen, on tensor cores; for `layers/linear.py`.

Such a product only streams its weight, like those of `small_linear.py`, but has too many multiplications for anything
but tensor cores. A program takes BLOCK_N rows of the weight, and its warps share out their length: each multiplies a
slice of the input with a slice of the weight, and the sums are added up at the end. So all of a program's loads are in
flight at once, and, with programmatic dependent launch, before the input is there.

GATED, W is two matrices, gate over up, and y = silu(x @ gate.T) * (x @ up.T): a program takes the same rows of both.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs
from nanovllm.kernels.silu_and_mul import gate

MAX_ROWS = 16
MAX_ELEMENTS = 1 << 23  # of the weight: measured on one H200, larger matrices do as well in cuBLAS
TILE_BYTES = 1 << 16  # of the weight in one program, held in registers
WARP_K = 256  # inner dimension that one warp takes at a time


@triton.jit
def _load_slices(weight_ptr, cell, n_mask, k, K: tl.constexpr):
    # Each weight is used once: let it leave the L2 first.
    return tl.load(weight_ptr + cell, mask=n_mask & (k < K), other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["num_rows", "N"])
def _skinny_linear_kernel(
    y_ptr,  # [M, N]
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K], GATED [2 * N, K]
    bias_ptr,  # as long as the weight, None without BIAS
    x_stride,
    num_rows,
    N,
    K: tl.constexpr,
    M_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SLICES: tl.constexpr,  # one for each warp
    SLICE: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    CHUNK: tl.constexpr = NUM_SLICES * SLICE
    NUM_CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    m = tl.arange(0, M_PAD)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # All operands are [slice, row, k in the slice].
    k = tl.arange(0, NUM_SLICES)[:, None, None] * SLICE + tl.arange(0, SLICE)[None, None, :]
    cell = n.to(tl.int64)[None, :, None] * K + k
    up_ptr = weight_ptr + N.to(tl.int64) * K
    m_mask, n_mask = (m < num_rows)[None, :, None], (n < N)[None, :, None]
    weight = _load_slices(weight_ptr, cell, n_mask, k, K)
    if GATED:
        up_weight = _load_slices(up_ptr, cell, n_mask, k, K)
    dtype = weight.dtype
    wait_for_inputs(PDL)
    acc = tl.zeros((NUM_SLICES, M_PAD, BLOCK_N), tl.float32)
    up_acc = tl.zeros((NUM_SLICES, M_PAD, BLOCK_N), tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        x_k = chunk * CHUNK + k
        x = tl.load(x_ptr + m[None, :, None] * x_stride + x_k, mask=m_mask & (x_k < K), other=0.0)
        if chunk + 1 < NUM_CHUNKS:
            first = (chunk + 1) * CHUNK
            next_weight = _load_slices(weight_ptr + first, cell, n_mask, first + k, K)
            if GATED:
                next_up_weight = _load_slices(up_ptr + first, cell, n_mask, first + k, K)
        acc = tl.dot(x, tl.permute(weight, (0, 2, 1)), acc, input_precision="ieee")
        if GATED:
            up_acc = tl.dot(x, tl.permute(up_weight, (0, 2, 1)), up_acc, input_precision="ieee")
        if chunk + 1 < NUM_CHUNKS:
            weight = next_weight
            if GATED:
                up_weight = next_up_weight
    y = tl.sum(acc, axis=0)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = tl.sum(up_acc, axis=0)
        if BIAS:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        y = gate(y, up, dtype)
    tl.store(y_ptr + m[:, None] * N + n[None, :], y, mask=(m < num_rows)[:, None] & (n < N)[None, :])


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """x [M, K] with M <= MAX_ROWS, weight [N, K] contiguous, bias [N]. Returns x @ weight.T + bias, [M, N].

    Gated, the first half of the features is the gate of the second, and the result is [M, N / 2].
    """
    num_rows = x.shape[0]
    n, k = weight.shape
    n = n // 2 if gated else n
    assert num_rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous(), (num_rows, x.stride(), weight.stride())
    k_pad = triton.next_power_of_2(k)
    num_slices = min(max(k_pad // WARP_K, 1), 4 if k <= 1024 else 8)
    row_bytes = k_pad * weight.element_size()
    block_n = min(max(TILE_BYTES // (2 * row_bytes if gated else row_bytes), 8), 32)
    y = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    launch(
        _skinny_linear_kernel,
        (triton.cdiv(n, block_n),),
        y,
        x,
        weight,
        bias,
        x.stride(0),
        num_rows,
        n,
        K=k,
        M_PAD=16,  # the least that tl.dot takes
        BLOCK_N=block_n,
        NUM_SLICES=num_slices,
        SLICE=min(max(k_pad, 16), WARP_K),
        GATED=gated,
        BIAS=bias is not None,
        num_warps=num_slices,
        **pdl_options(x.device),
    )
    return y
