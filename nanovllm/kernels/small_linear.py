"""Matrix-vector products for a handful of rows, with what precedes them fused in; called by `layers/linear.py`.

With one to four rows a linear layer only streams its weight. A library GEMM splits such a matrix into too few pieces to
keep the memory busy; here a program takes a few rows of the weight whole, so that a thousand programs have all their
loads in flight at once. Every program needs all of the input, which is a few kilobytes: it recomputes from there what
would otherwise be a kernel of its own, and rounds where that kernel would.

    PLAIN      y = x @ W.T
    NORM       y = norm(x + residual) @ W.T, and the sum is returned as well (rms_norm.py)
    SILU_MUL   y = (silu(gate) * up) @ W.T, with gate and up packed in x (silu_and_mul.py)
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs

MAX_ROWS = 4
# Past one row, only up to this many weight elements: measured on one H200, larger matrices do better in cuBLAS.
MAX_ELEMENTS = 1 << 23
# Weight elements a program loads: 8 KB in 16-bit dtypes, so that each of its threads has several loads in flight.
TILE_ELEMENTS = 4096

PLAIN, NORM, SILU_MUL = 0, 1, 2


# Few compiled kernels serve all layers: only the inner size and the number of rows, rounded up, make another one.
@triton.jit(do_not_specialize=["N", "num_rows"])
def _small_linear_kernel(
    y_ptr,  # [M, N]
    x_ptr,  # [M, K], or [M, 2 * K] with SILU_MUL
    weight_ptr,  # [N, K]
    bias_ptr,  # [N], None without BIAS
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
    K_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PROLOGUE: tl.constexpr,  # 0 plain, 1 norm, 2 silu-mul
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    program = tl.program_id(0)
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, K_PAD)
    n_mask, k_mask = n < N, k < K
    # The weight first: it depends on nothing, and its loads run while the input is still being computed.
    cell = n.to(tl.int64)[:, None] * K + k[None, :]
    weight = tl.load(weight_ptr + cell, mask=n_mask[:, None] & k_mask[None, :], other=0.0)
    dtype = weight.dtype
    if PROLOGUE == 1:
        norm_weight = tl.load(norm_weight_ptr + k, mask=k_mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    for m in tl.static_range(M_PAD):
        row_mask = k < tl.where(m < num_rows, K, 0)
        x = tl.load(x_ptr + m * x_stride + k, mask=row_mask, other=0.0).to(tl.float32)
        if PROLOGUE == 1:
            x += tl.load(residual_ptr + m * residual_stride + k, mask=row_mask, other=0.0).to(tl.float32)
            rounded = x.to(dtype)
            if program == 0:
                tl.store(new_residual_ptr + m * K + k, rounded, mask=row_mask)
            x = rounded.to(tl.float32)
            x = (x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)).to(dtype).to(tl.float32)
            x = (x * norm_weight).to(dtype).to(tl.float32)
        if PROLOGUE == 2:
            up = tl.load(x_ptr + m * x_stride + K + k, mask=row_mask, other=0.0).to(tl.float32)
            x = (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
            x = (x * up).to(dtype).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
        if BIAS:
            y += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + m * N + n, y, mask=n < tl.where(m < num_rows, N, 0))


def _launch(
    prologue: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    num_rows = x.shape[0]
    n, k = weight.shape
    assert num_rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous(), (num_rows, x.stride(), weight.stride())
    k_pad = triton.next_power_of_2(k)
    block_n = max(TILE_ELEMENTS // k_pad, 1)
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
        K_PAD=k_pad,
        BLOCK_N=block_n,
        PROLOGUE=prologue,
        BIAS=bias is not None,
        num_warps=4,
        **pdl_options(x.device),
    )
    return y, new_residual


def small_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] with M <= MAX_ROWS, weight [N, K] contiguous, bias [N]. Returns x @ weight.T + bias, [M, N]."""
    return _launch(PLAIN, x, weight, bias)[0]


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [M, K]. Returns (rms_norm(x + residual) @ weight.T + bias, x + residual); no input is changed."""
    return _launch(NORM, x, weight, bias, residual, norm_weight, eps)


def silu_mul_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, 2 * K], gate then up. Returns (silu(gate) * up) @ weight.T + bias, [M, N]."""
    return _launch(SILU_MUL, x, weight, bias)[0]
