"""The group of ranks that share one model, as the tensor-parallel layers see it.

The `ModelRunner` makes one `Group` and hands it to the model, which hands it to its layers. Nothing here touches
torch's default process group, of which a process can have only one: two engines may live side by side.
"""

import torch
from torch import distributed as dist


class Group:
    """Rank, size, and the three collectives that the layers need. With one rank every call returns at once."""

    def __init__(self, rank: int = 0, size: int = 1, process_group: "dist.ProcessGroup | None" = None) -> None:
        assert 0 <= rank < size and (size == 1 or process_group is not None), (rank, size)
        self.rank = rank
        self.size = size
        self._pg = process_group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place."""
        if self.size > 1:
            self._pg.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's `x`, in rank order, on rank 0; None on the others."""
        if self.size == 1:
            return [x]
        # all_gather: NCCL's process group has no plain gather, and the slices are small.
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._pg.allgather([parts], [x.contiguous()]).wait()
        return parts if self.rank == 0 else None

    def min(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values, on every rank."""
        if self.size == 1:
            return value
        parts = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(self.size)]
        self._pg.allgather([parts], [torch.tensor([value], device=device)]).wait()
        return min(int(part) for part in parts)

    def abort(self) -> None:
        """Break off whatever collective this rank waits in; the group is of no use afterwards.

        That is NCCL's way. On gloo a collective ends when the connections do, with the death of a peer.
        """
        if self.size > 1 and hasattr(self._pg, "abort"):
            self._pg.abort()

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x` on every rank, in place."""
        if self.size > 1:
            self._pg.broadcast([x], dist.BroadcastOptions()).wait()
        return x


SINGLE = Group()


def divide(what: str, total: int, parts: int) -> int:
    """`total / parts`, or ValueError that says which dimension does not split over the ranks."""
    if total % parts:
        raise ValueError(f"{what}={total} does not divide by tensor_parallel_size={parts}; use one that divides it")
    return total // parts
