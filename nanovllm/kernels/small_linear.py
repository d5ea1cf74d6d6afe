"""Matrix-vector products for one row or two; for `layers/linear.py`, `fused.py`.

With so few rows a linear layer only streams its weight. A library GEMM splits such a matrix into too few pieces to keep
the memory busy; here a program takes a few rows of the weight whole, so that a thousand programs have all their loads
in flight at once, and, with programmatic dependent launch, before the input is there.

GATED, W is two matrices, gate over up, and y = silu(x @ gate.T) * (x @ up.T): a program takes the same rows of both and
rounds where separate kernels would.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs
from nanovllm.kernels.silu_and_mul import gate

MAX_ROWS = 2
# Past one row, only up to this many weight elements: measured on one H200, larger matrices do better in cuBLAS.
MAX_ELEMENTS = 1 << 23
# Weight elements a program has on their way: 8 KB in 16-bit dtypes, so that each thread has several loads in flight.
TILE_ELEMENTS = 4096
# A matrix of more elements than this has programs enough without that: there a program walks along its rows, with one
# chunk of them in its hands and the next on its way.
LARGE_ELEMENTS = 1 << 22
CHUNK = 1024


@triton.jit
def _load(weight_ptr, cell, n_mask, k, K: tl.constexpr):
    # Each weight is used once: let it leave the L2 first.
    return tl.load(weight_ptr + cell, mask=n_mask[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")


# Few compiled kernels serve all layers: only the inner size and the number of rows, rounded up, make another one.
@triton.jit(do_not_specialize=["N", "num_rows"])
def _small_linear_kernel(
    y_ptr,  # [M, N]
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K], GATED [2 * N, K]
    bias_ptr,  # as long as the weight, None without BIAS
    x_stride,
    num_rows,
    N,
    M_PAD: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,  # of K; all of it with M_PAD above 1
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, CHUNK)
    n_mask = n < N
    # The weight first: it depends on nothing, and its loads run while the input is still being computed.
    cell = n.to(tl.int64)[:, None] * K + k[None, :]
    up_ptr = weight_ptr + N.to(tl.int64) * K
    weight = _load(weight_ptr, cell, n_mask, k, K)
    if GATED:
        up_weight = _load(up_ptr, cell, n_mask, k, K)
    dtype = weight.dtype
    wait_for_inputs(PDL)
    for m in tl.static_range(M_PAD):
        acc = tl.zeros((BLOCK_N, CHUNK), tl.float32)
        up_acc = tl.zeros((BLOCK_N, CHUNK), tl.float32)
        for first in tl.static_range(0, K, CHUNK):
            row_mask = first + k < tl.where(m < num_rows, K, 0)
            x = tl.load(x_ptr + m * x_stride + first + k, mask=row_mask, other=0.0).to(tl.float32)
            if first + CHUNK < K:
                next_weight = _load(weight_ptr + first + CHUNK, cell, n_mask, first + CHUNK + k, K)
                if GATED:
                    next_up_weight = _load(up_ptr + first + CHUNK, cell, n_mask, first + CHUNK + k, K)
            acc += weight.to(tl.float32) * x[None, :]
            if GATED:
                up_acc += up_weight.to(tl.float32) * x[None, :]
            if first + CHUNK < K:
                weight = next_weight
                if GATED:
                    up_weight = next_up_weight
        y = tl.sum(acc, axis=1)
        if BIAS:
            y += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
        if GATED:
            up = tl.sum(up_acc, axis=1)
            if BIAS:
                up += tl.load(bias_ptr + N + n, mask=n_mask, other=0.0).to(tl.float32)
            y = gate(y, up, dtype)
        tl.store(y_ptr + m * N + n, y, mask=n < tl.where(m < num_rows, N, 0))


def small_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """x [M, K] with M <= MAX_ROWS, weight [N, K] contiguous, bias [N]. Returns x @ weight.T + bias, [M, N].

    Gated, the first half of the features is the gate of the second, and the result is [M, N / 2].
    """
    num_rows = x.shape[0]
    n, k = weight.shape
    n = n // 2 if gated else n
    assert num_rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous(), (num_rows, x.stride(), weight.stride())
    is_chunked = num_rows == 1 and weight.numel() > LARGE_ELEMENTS and k > CHUNK
    chunk, tile = (CHUNK, 2 * CHUNK) if is_chunked else (triton.next_power_of_2(k), TILE_ELEMENTS)
    block_n = max(tile // (2 * chunk if gated else chunk), 1)
    y = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    launch(
        _small_linear_kernel,
        (triton.cdiv(n, block_n),),
        y,
        x,
        weight,
        bias,
        x.stride(0),
        num_rows,
        n,
        M_PAD=triton.next_power_of_2(num_rows),
        K=k,
        CHUNK=chunk,
        BLOCK_N=block_n,
        GATED=gated,
        BIAS=bias is not None,
        num_warps=4,
        **pdl_options(x.device),
    )
    return y
