"""Two layers as one: what a model writes where, on a GPU and for a few rows, the first is a prologue of the second.

Each function says in its last lines what it means; the kernels above them compute the same with one launch.
"""

import torch

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase, is_small
from nanovllm.utils.dist import Group


def reduce_norm(
    group: Group, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm(s + residual)` and `s + residual`, s being the sum over the ranks of x [T, K], which may be overwritten."""
    return norm(x, residual) if group.size == 1 else group.all_reduce_norm(x, residual, norm)


def norm_linear(
    norm: RMSNorm, linear: LinearBase, x: torch.Tensor, residual: torch.Tensor | None, is_partial: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear(norm(x + residual))`, and the sum, which is the next residual. x: [T, K]; no residual counts as 0.

    `is_partial`: x is this rank's part of a sum (a RowParallelLinear without `reduce_results` made it).
    """
    if residual is None:
        return linear(norm(x)), x
    if is_partial and linear.group.size > 1:
        x, residual = reduce_norm(linear.group, norm, x, residual)
        return linear(x), residual
    if is_small(x, linear.weight, fused=True):
        from nanovllm.kernels.small_linear import norm_linear as kernel

        y, residual = kernel(x, residual, norm.weight, norm.eps, linear.weight, linear.own_bias)
        return linear.finish(y), residual
    x, residual = norm(x, residual)
    return linear(x), residual


def silu_mul_linear(act_fn: SiluAndMul, linear: LinearBase, x: torch.Tensor) -> torch.Tensor:
    """`linear(act_fn(x))`. x: [T, 2 * K], gate then up."""
    if is_small(x, linear.weight, fused=True):
        from nanovllm.kernels.small_linear import silu_mul_linear as kernel

        return linear.finish(kernel(x, linear.weight, linear.own_bias))
    return linear(act_fn(x))
