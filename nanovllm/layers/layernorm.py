"""RMSNorm (Zhang and Sennrich, 2019), plain and with the residual addition that precedes it in every layer."""

import torch
from torch import nn

from nanovllm.layers.linear import copy_into


class RMSNorm(nn.Module):
    """Scale to unit root mean square in float32, then by a learnt weight in the input's dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("eps_tensor", torch.tensor(eps, dtype=torch.float32), persistent=False)
        self.weight = nn.Parameter(torch.ones(hidden_size), requires_grad=False)
        self.weight.weight_loader = lambda param, source: copy_into(param.data, source[:])

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Norm of `x` [..., hidden]; with a residual: (norm of `x + residual`, the sum). The inputs are not changed."""
        if x.is_cuda:
            from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm

            return (
                rms_norm(x, self.weight, self.eps)
                if residual is None
                else add_rms_norm(x, residual, self.weight, self.eps)
            )
        if residual is None:
            return self.normalize(x)
        residual = residual + x  # in the order of the residual's memory, by rows
        return self.normalize(residual), residual

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """The plain form, on any device."""
        return unit_rms(x, self.eps_tensor).mul_(self.weight)


def unit_rms(x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x scaled to unit root mean square along its last dimension, in float32; a new tensor of x's dtype.

    In 16 bits transformers rounds here, before it applies the weight, and so do we.
    """
    is_float32 = x.dtype is torch.float32  # then without casts: in a decode step a CPU feels those that do nothing
    x32 = x if is_float32 else x.float()
    norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    # eps + norm ** 2 / size: few operations, each of which costs a CPU as much as the arithmetic of a decode step.
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    normed = x32 * scale
    return normed if is_float32 else normed.to(x.dtype)
