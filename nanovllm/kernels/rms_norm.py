"""RMSNorm over the hidden dimension, plain and fused with the residual addition before it; for the `RMSNorm` layer.

One program normalises one row. The arithmetic rounds where transformers' `Qwen3RMSNorm` rounds: the mean square and the
scaling in float32, the result cast to the input's dtype, then multiplied by the weight.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs


@triton.jit
def _rms_norm_kernel(
    out_ptr,  # [T, H]
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]; not read without ADD
    new_residual_ptr,  # [T, H]; not written without ADD
    weight_ptr,  # [H]
    x_stride,
    residual_stride,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < H
    dtype = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        # The sum is rounded before it is normalised, so that the norm sees what the next layer's residual holds.
        x += tl.load(residual_ptr + row * residual_stride + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(new_residual_ptr + row * H + offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)).to(dtype)
    tl.store(out_ptr + row * H + offsets, normed.to(tl.float32) * weight.to(tl.float32), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each row of x [T, H] (rows may be strided) and scale by weight [H]. Returns a new [T, H]."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and x + residual itself: both new [T, H] tensors, neither input is changed."""
    return _launch(x, residual, weight, eps)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, hidden_size = x.shape
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1), "the hidden dimension must be contiguous"
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    new_residual = out if residual is None else torch.empty_like(out)
    source = x if residual is None else residual
    block = triton.next_power_of_2(hidden_size)
    launch(
        _rms_norm_kernel,
        (num_tokens,),
        out,
        x,
        source,
        new_residual,
        weight,
        x.stride(0),
        source.stride(0),
        eps,
        H=hidden_size,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(max(block // 256, 1), 16),  # 8 elements a thread: one 16-byte load in 16-bit dtypes
        **pdl_options(x.device),
    )
    return out, new_residual
