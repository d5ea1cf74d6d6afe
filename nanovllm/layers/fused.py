"""Two layers as one: what a model writes where the second can be part of the first one's kernel.

Each function says in its last line what it means; the kernels above it compute the same with fewer launches.
"""

import torch

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, few_rows_kernel
from nanovllm.utils.dist import Group


def reduce_norm(
    group: Group, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm(s + residual)` and `s + residual`, s being the sum over the ranks of x [T, K], which may be overwritten.

    Without a residual, as before the first layer, x is whole, and the result `norm(x)` and x.
    """
    if residual is None:
        return norm(x), x
    if group.size > 1:
        return group.all_reduce_norm(x, residual, norm)
    return norm(x, residual)


def gated_linear(linear: MergedColumnParallelLinear, act_fn: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
    """`act_fn(linear(x))`. x: [T, hidden] -> [T, this rank's intermediate size]."""
    kernel = few_rows_kernel(x, linear.weight)
    if kernel is not None:
        return kernel(x, linear.weight, linear.own_bias, gated=True)
    return act_fn(linear(x))
