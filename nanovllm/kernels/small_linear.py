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
# Weight elements a program loads: 8 KB in 16-bit dtypes, so that each of its threads has several loads in flight.
TILE_ELEMENTS = 4096


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
    K_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
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
    if GATED:
        up_weight = tl.load(
            weight_ptr + N.to(tl.int64) * K + cell, mask=n_mask[:, None] & k_mask[None, :], other=0.0
        )  # fmt: skip
    dtype = weight.dtype
    if NORM:
        norm_weight = tl.load(norm_weight_ptr + k, mask=k_mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    for m in tl.static_range(M_PAD):
        row_mask = k < tl.where(m < num_rows, K, 0)
        x = tl.load(x_ptr + m * x_stride + k, mask=row_mask, other=0.0).to(tl.float32)
        if NORM:
            x += tl.load(residual_ptr + m * residual_stride + k, mask=row_mask, other=0.0).to(tl.float32)
            rounded = x.to(dtype)
            if program == 0:
                tl.store(new_residual_ptr + m * K + k, rounded, mask=row_mask)
            x = rounded.to(tl.float32)
            x = (x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)).to(dtype).to(tl.float32)
            x = (x * norm_weight).to(dtype).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
        if BIAS:
            y += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
        if GATED:
            up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1)
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
    k_pad = triton.next_power_of_2(k)
    block_n = max(TILE_ELEMENTS // (2 * k_pad if gated else k_pad), 1)
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
