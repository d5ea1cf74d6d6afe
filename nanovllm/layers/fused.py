"""Two layers as one: what a model writes where, on a GPU and for a few rows, a neighbour of a projection is part of it.

Each function says in its last lines what it means; the kernels above them compute the same with fewer launches.
"""

import torch

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase, few_rows_kernel
from nanovllm.utils.dist import Group


def reduce_norm(
    group: Group, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm(s + residual)` and `s + residual`, s being the sum over the ranks of x [T, K], which may be overwritten."""
    return norm(x, residual) if group.size == 1 else group.all_reduce_norm(x, residual, norm)


def norm_linear(
    norm: RMSNorm,
    linear: LinearBase,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    act_fn: SiluAndMul | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`act_fn(linear(norm(s + residual)))`, and the sum, which is the next residual.

    x [T, K] is this rank's part of a sum s, as a RowParallelLinear without `reduce_results` leaves it; with no residual
    it is whole.
    """
    if residual is None:
        return _linear(linear, act_fn, norm(x)), x
    if linear.group.size == 1 and _takes_norm(x, linear.weight):
        from nanovllm.kernels.small_linear import norm_linear as kernel

        return kernel(x, residual, norm.weight, norm.eps, linear.weight, linear.own_bias, act_fn is not None)
    x, residual = reduce_norm(linear.group, norm, x, residual)
    return _linear(linear, act_fn, x), residual


def _linear(linear: LinearBase, act_fn: SiluAndMul | None, x: torch.Tensor) -> torch.Tensor:
    kernel = few_rows_kernel(x, linear.weight)
    if kernel is not None and act_fn is not None:
        return kernel(x, linear.weight, linear.own_bias, gated=True)
    return linear(x) if act_fn is None else act_fn(linear(x))


def _takes_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Each program of the kernel computes the norm again: worth it for one row or two and a small matrix only."""
    if not x.is_cuda:
        return False
    from nanovllm.kernels.small_linear import MAX_ELEMENTS, MAX_ROWS

    return x.shape[0] <= MAX_ROWS and weight.numel() <= MAX_ELEMENTS
