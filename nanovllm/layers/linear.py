"""Linear layers split over the ranks of a group, each of which knows how to load its own shard.

Models build them; the loader calls the `weight_loader` that hangs on every parameter with a sliceable source (a
safetensors slice, which reads only what is asked of it, or a tensor). Weights are `[output, input]`, as in torch.
With one rank every layer is an `F.linear`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.utils.dist import SINGLE, Group, divide
from nanovllm.utils.loader import source_shape

# Rows up to which a CPU computes weight @ x.T, for which a BLAS does not rearrange the weight in each call. Measured
# with MKL on 2 cores of an AMD EPYC, Qwen3-0.6B's shapes: 1.7 to 3.8 times as fast at 2 to 16 rows, 1.5 times at 64.
MAX_COLUMN_ROWS = 64


def copy_into(target: torch.Tensor, source: Any, what: str = "weight") -> None:
    """Copy a source (already cut to the shard) into a parameter or a part of it; shapes must agree exactly."""
    if tuple(target.shape) != source_shape(source):
        raise ValueError(f"{what}: the checkpoint has shape {source_shape(source)}, the model {tuple(target.shape)}")
    target.copy_(source)


def few_rows_kernel(x: torch.Tensor, weight: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """The kernel that beats the library's GEMM at so few rows, `kernel(x, weight, bias, gated)`; None on a CPU."""
    if not x.is_cuda or not x.shape[0]:
        return None
    from nanovllm.kernels import skinny_linear, small_linear

    num_rows, num_elements = x.shape[0], weight.numel()
    if num_rows == 1 or num_rows <= small_linear.MAX_ROWS and num_elements <= small_linear.MAX_ELEMENTS:
        return small_linear.small_linear
    if num_rows <= skinny_linear.MAX_ROWS and num_elements <= skinny_linear.MAX_ELEMENTS and x.element_size() == 2:
        return skinny_linear.skinny_linear
    return None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear`, by the kernel that is fastest at so many rows.

    On a CPU the memory of a few rows' result [T, N] goes by columns. Who passes it on to another product should write
    rows again, on the way: with both operands by rows each element is a dot product of two runs of memory.
    """
    kernel = few_rows_kernel(x, weight)
    if kernel is not None:
        return kernel(x, weight, bias)
    if not x.is_cuda and x.dtype is torch.float32 and 1 < x.shape[0] <= MAX_COLUMN_ROWS:
        y = torch.mm(weight, x.t()).t()
        return y if bias is None else y.add_(bias)
    return F.linear(x, weight, bias)


class LinearBase(nn.Module, ABC):
    """A weight, an optional bias, and the rule by which a rank takes its part of them."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, group: Group = SINGLE) -> None:
        """`input_size` and `output_size` are this rank's own."""
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        self.weight.weight_loader = self.weight_loader
        if bias:
            self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False)
            self.bias.weight_loader = self.weight_loader
        else:
            self.register_parameter("bias", None)

    @abstractmethod
    def weight_loader(self, param: nn.Parameter, source: Any, *shard_id: Any) -> None:
        """Fill `param`, or the part of it that `shard_id` names, from this rank's part of `source`."""

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias that this rank adds."""
        return self.bias

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """What remains to be done to this rank's product."""
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.finish(linear(x, self.weight, self.own_bias))


class ReplicatedLinear(LinearBase):
    """Every rank holds all of it."""

    def weight_loader(self, param: nn.Parameter, source: Any) -> None:
        copy_into(param.data, source[:])


class ColumnParallelLinear(LinearBase):
    """Output features split over the ranks; the outputs stay split."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, group: Group = SINGLE) -> None:
        super().__init__(input_size, divide("output features", output_size, group.size), bias, group)

    def weight_loader(self, param: nn.Parameter, source: Any) -> None:
        load_rows(param.data, source, self.group)


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel matrices over the same input (gate and up) as one, so that one matmul serves them."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False, group: Group = SINGLE) -> None:
        self.shard_sizes = [divide("output features", size, group.size) for size in output_sizes]
        super().__init__(input_size, sum(self.shard_sizes), bias, group)

    def weight_loader(self, param: nn.Parameter, source: Any, shard_id: int) -> None:
        start = sum(self.shard_sizes[:shard_id])
        load_rows(param.data[start : start + self.shard_sizes[shard_id]], source, self.group)


class QKVParallelLinear(LinearBase):
    """Query, key and value projections as one matrix, split by whole heads.

    With more ranks than KV heads each KV head is held by `size // total_num_kv_heads` neighbouring ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        bias: bool = False,
        group: Group = SINGLE,
    ) -> None:
        self.head_dim = head_dim
        self.num_heads = divide("attention heads", total_num_heads, group.size)
        if total_num_kv_heads >= group.size:
            self.num_kv_heads = divide("KV heads", total_num_kv_heads, group.size)
            self.num_kv_replicas = 1
        else:
            self.num_kv_heads = 1
            if group.size % total_num_kv_heads:
                raise ValueError(
                    f"tensor_parallel_size={group.size} is neither a divisor nor a multiple of the "
                    f"{total_num_kv_heads} KV heads; use one that is"
                )
            self.num_kv_replicas = group.size // total_num_kv_heads
        super().__init__(hidden_size, (self.num_heads + 2 * self.num_kv_heads) * head_dim, bias, group)

    def weight_loader(self, param: nn.Parameter, source: Any, shard_id: str) -> None:
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        start, size = {"q": (0, q_size), "k": (q_size, kv_size), "v": (q_size + kv_size, kv_size)}[shard_id]
        num_replicas = 1 if shard_id == "q" else self.num_kv_replicas
        load_rows(param.data[start : start + size], source, self.group, num_replicas)


class RowParallelLinear(LinearBase):
    """Input features split over the ranks: each multiplies its part, and the parts are summed.

    Without `reduce_results` the sum is left to who takes the output, where it can be one kernel with what follows.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        group: Group = SINGLE,
        reduce_results: bool = True,
    ) -> None:
        super().__init__(divide("input features", input_size, group.size), output_size, bias, group)
        self.reduce_results = reduce_results
        self.weight.num_inputs = input_size  # of the whole, for random weights of the right scale

    def weight_loader(self, param: nn.Parameter, source: Any) -> None:
        if param.dim() == 1:  # the bias is whole on every rank and added by rank 0 alone
            return copy_into(param.data, source[:])
        size = param.shape[1]
        check_total(source, dim=1, total=size * self.group.size)
        return copy_into(param.data, source[:, self.group.rank * size : (self.group.rank + 1) * size])

    @property
    def own_bias(self) -> torch.Tensor | None:
        return self.bias if self.group.rank == 0 else None

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(y) if self.reduce_results else y


def load_rows(target: torch.Tensor, source: Any, group: Group, num_replicas: int = 1) -> None:
    """Copy this rank's rows of `source`; `num_replicas` neighbouring ranks share one part."""
    size = target.shape[0]
    check_total(source, dim=0, total=size * group.size // num_replicas)
    start = group.rank // num_replicas * size
    copy_into(target, source[start : start + size])


def check_total(source: Any, dim: int, total: int) -> None:
    shape = source_shape(source)
    if len(shape) <= dim or shape[dim] != total:
        raise ValueError(f"the checkpoint has shape {shape}, the model {total} in dimension {dim}")
