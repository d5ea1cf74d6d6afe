"""Matrix-vector products for one row or two, with their neighbours fused in; for `layers/linear.py`, `fused.py`.

With so few rows a linear layer only streams its weight. A library GEMM splits such a matrix into too few pieces to keep
the memory busy; here a program takes a few rows of the weight whole, so that a thousand programs have all their loads
in flight at once.

    NORM   y = norm(x + residual) @ W.T, and the sum is returned as well (rms_norm.py). Every program needs all of the
           input, which is a few kilobytes, and recomputes the norm from there.
    GATED  W is two matrices, gate over up, and y = silu(x @ gate.T) * (x @ up.T) (silu_and_mul.py). A program takes the
           same rows of both.

Both round where the kernels that they stand for would.
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
    residual_ptr,  # [M, K], None without NORM
    new_residual_ptr,  # [M, K], None without NORM
    norm_weight_ptr,  # [K], None without NORM
    x_stride,
    residual_stride,
    eps,
    num_rows,
    N,
    M_PAD: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,  # of K; all of it with NORM, and with M_PAD above 1
    BLOCK_N: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    program = tl.program_id(0)
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, CHUNK)
    n_mask = n < N
    # The weight first: it depends on nothing, and its loads run while the input is still being computed.
    cell = n.to(tl.int64)[:, None] * K + k[None, :]
    up_ptr = weight_ptr + N.to(tl.int64) * K
    weight = _load(weight_ptr, cell, n_mask, k, K)
    if GATED:
        up_weight = _load(up_ptr, cell, n_mask, k, K)
    dtype = weight.dtype
    if NORM:
        norm_weight = tl.load(norm_weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
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
            if NORM:
                x += tl.load(residual_ptr + m * residual_stride + k, mask=row_mask, other=0.0).to(tl.float32)
                rounded = x.to(dtype)
                if program == 0:
                    tl.store(new_residual_ptr + m * K + k, rounded, mask=row_mask)
                x = rounded.to(tl.float32)
                x = (x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)).to(dtype).to(tl.float32)
                x = (x * norm_weight).to(dtype).to(tl.float32)
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


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    num_rows = x.shape[0]
    n, k = weight.shape
    n = n // 2 if gated else n
    assert num_rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous(), (num_rows, x.stride(), weight.stride())
    is_chunked = residual is None and num_rows == 1 and weight.numel() > LARGE_ELEMENTS and k > CHUNK
    chunk, tile = (CHUNK, 2 * CHUNK) if is_chunked else (triton.next_power_of_2(k), TILE_ELEMENTS)
    block_n = max(tile // (2 * chunk if gated else chunk), 1)
    y = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    new_residual = None if residual is None else torch.empty((num_rows, k), dtype=x.dtype, device=x.device)
    launch(
        _small_linear_kernel,
        (triton.cdiv(n, block_n),),
        y,
        x,
        weight,
        bias,
        residual,
        new_residual,
        norm_weight,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        eps,
        num_rows,
        n,
        M_PAD=triton.next_power_of_2(num_rows),
        K=k,
        CHUNK=chunk,
        BLOCK_N=block_n,
        NORM=residual is not None,
        GATED=gated,
        BIAS=bias is not None,
        num_warps=4,
        **pdl_options(x.device),
    )
    return y, new_residual


def small_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """x [M, K] with M <= MAX_ROWS, weight [N, K] contiguous, bias [N]. Returns x @ weight.T + bias, [M, N].

    Gated, the first half of the features is the gate of the second, and the result is [M, N / 2].
    """
    return _launch(x, weight, bias, gated)[0]


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`small_linear` of rms_norm(x + residual), x + residual); x, residual [M, K], neither is changed."""
    return _launch(x, weight, bias, gated, residual, norm_weight, eps)
