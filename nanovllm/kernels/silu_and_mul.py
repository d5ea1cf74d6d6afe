"""The activation of a gated MLP, SiLU(gate) * up, over the packed output of the gate_up projection."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs

BLOCK = 1024


@triton.jit
def gate(x, up, dtype: tl.constexpr):
    """silu(x) * up of float32 values, rounded to `dtype` where separate operations would round."""
    x = x.to(dtype).to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(dtype)
    return silu.to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def _silu_and_mul_kernel(out_ptr, x_ptr, x_stride, I: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # noqa: E741
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < I
    x = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + I + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + row * I + offsets, gate(x.to(tl.float32), up.to(tl.float32), x.dtype), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I]: gate then up in each row (rows may be strided). Returns [T, I] of the same dtype."""
    num_tokens, width = x.shape
    assert x.stride(1) == 1, "the last dimension must be contiguous"
    size = width // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    launch(
        _silu_and_mul_kernel,
        (num_tokens, triton.cdiv(size, BLOCK)),
        out,
        x,
        x.stride(0),
        I=size,
        BLOCK=BLOCK,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out
