"""The gated activation of the MLP."""

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """silu(gate) * up of a packed [T, 2 * size] input (Shazeer, 2020: SwiGLU)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * size] -> [T, size]."""
        if x.is_cuda:
            from nanovllm.kernels.silu_and_mul import silu_and_mul

            return silu_and_mul(x)
        gate, up = x.chunk(2, dim=-1)
        # By rows, whatever x is: see `layers.linear.linear`.
        return F.silu(gate).mul_(up).contiguous()
