"""The group of ranks that share one model, as the tensor-parallel layers see it.

The `ModelRunner` makes one `Group` and hands it to the model, which hands it to its layers. Nothing here touches
torch's default process group, of which a process can have only one: two engines may live side by side.
"""

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from nanovllm.utils.peer_memory import PeerMemory

if TYPE_CHECKING:
    from nanovllm.kernels.all_reduce import Inboxes
    from nanovllm.layers.layernorm import RMSNorm

logger = logging.getLogger("nanovllm")

# Largest message, in bytes by the number of ranks, that goes through peer memory. A rank there sends its part to every
# other one, which for many ranks costs more than what NCCL does; and rows, for what the inboxes take.
PEER_BYTES = {2: 4 << 20, 3: 2 << 20, 4: 2 << 20}
PEER_BYTES_MANY = 1 << 19
PEER_ROWS = 512
PROBE_S = 30.0  # for the trial of the kernel, which the other ranks may have to compile first


class Group:
    """Rank, size, and the collectives that the layers need. With one rank every call returns at once."""

    def __init__(self, rank: int = 0, size: int = 1, process_group: "dist.ProcessGroup | None" = None) -> None:
        assert 0 <= rank < size and (size == 1 or process_group is not None), (rank, size)
        self.rank = rank
        self.size = size
        self._pg = process_group
        # For small messages on GPUs, see `use_peer_memory`.
        self._memory: PeerMemory | None = None
        self._inboxes: Inboxes | None = None
        self._is_aborted = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks, in place if `x` is contiguous."""
        if self.size == 1:
            return x
        x = x.contiguous()
        if self._fits_inboxes(x):
            from nanovllm.kernels.all_reduce import all_reduce

            return all_reduce(x, self._inboxes)
        self._wait(self._pg.allreduce([x], _in_stream(c10d.AllreduceOptions())))
        return x

    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: "RMSNorm"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With s the sum of `x` over the ranks: (norm of s + residual, s + residual). `x` may be overwritten."""
        if not len(x):  # on all ranks alike
            return x, residual
        if self._fits_inboxes(x):
            from nanovllm.kernels.all_reduce import all_reduce_add_rms_norm

            return all_reduce_add_rms_norm(x, residual, norm.weight, norm.eps, self._inboxes)
        return norm(self.all_reduce(x), residual)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's `x`, in rank order, on rank 0; None on the others."""
        parts = self._all_gather(x.contiguous())
        return parts if self.rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x` on every rank, in place."""
        if self.size > 1:
            self._wait(self._pg.broadcast([x], _in_stream(c10d.BroadcastOptions())))
        return x

    def min(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values, on every rank. RuntimeError if another rank has failed."""
        if self.size == 1:
            return value
        smallest = min(int(part) for part in self._all_gather(torch.tensor([value], device=device)))
        if self._is_aborted:
            raise RuntimeError("the collective has been broken off")
        return smallest

    def _all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x`, which must be contiguous, in rank order."""
        if self.size == 1:
            return [x]
        parts = torch.empty((self.size * len(x), *x.shape[1:]), dtype=x.dtype, device=x.device)
        self._wait(self._pg._allgather_base(parts, x, _in_stream(c10d.AllgatherOptions())))
        return list(parts.chunk(self.size))

    @staticmethod
    def _wait(work: "dist.Work | None") -> None:
        """Order what follows after the collective; on a GPU nobody waits for it here."""
        if work is not None:
            work.wait()

    # ------------------------------------------------------------------ peer memory

    def use_peer_memory(self, hidden_size: int, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """From now on sum up to `max_rows` rows of `hidden_size` on GPUs with our own kernel, if it works here.

        To be called on every rank. Whether it works all ranks find out together by trying, so that they agree.
        """
        if self.size == 1 or device.type != "cuda":
            return
        max_bytes = PEER_BYTES.get(self.size, PEER_BYTES_MANY)
        max_rows = min(max_rows, PEER_ROWS, max_bytes // (hidden_size * dtype.itemsize))
        problem = None
        try:
            self._share_inboxes(hidden_size, max_rows, dtype, device)
        except (RuntimeError, OSError) as error:
            problem = error
        if not self.min(problem is None, device):
            problem = problem or "another rank could not"
        elif not self.min(self._probe(hidden_size, max_rows, dtype, device), device):
            problem = "the sum of a trial was wrong or did not come"
        if problem is not None:
            self._close_inboxes()
            logger.warning("no peer memory between the GPUs (%s): every all-reduce goes through NCCL", problem)

    def _share_inboxes(self, hidden_size: int, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        from nanovllm.kernels.all_reduce import Inboxes, inbox_bytes

        handle, problem = bytes(PeerMemory.HANDLE_BYTES), None
        try:
            self._memory = PeerMemory(inbox_bytes(self.size, max_rows, hidden_size, dtype), device)
            handle = self._memory.handle
        except (RuntimeError, OSError) as error:
            problem = error
        handles = self._all_gather(torch.tensor(list(handle), dtype=torch.uint8, device=device))
        if problem is not None:
            raise problem
        addresses = self._memory.open([bytes(h.tolist()) for h in handles], self.rank)
        stop = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._inboxes = Inboxes(self.rank, torch.tensor(addresses, device=device), max_rows, hidden_size, dtype, stop)

    def _probe(self, hidden_size: int, max_rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a few sums through the inboxes come out right, within a time."""
        inputs = [
            torch.full((max_rows, hidden_size), self.rank + 1.0 + i, dtype=dtype, device=device) for i in (0, 1, 2)
        ]
        sums = [self.all_reduce(x) for x in inputs]
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + PROBE_S
        while not done.query():
            if time.monotonic() > deadline:
                self._inboxes.break_off()
                done.synchronize()
                return False
            time.sleep(0.001)
        expected = [sum(range(1, self.size + 1)) + i * self.size for i in (0, 1, 2)]
        return all(bool((total == value).all()) for total, value in zip(sums, expected, strict=True))

    def _fits_inboxes(self, x: torch.Tensor) -> bool:
        return self._inboxes is not None and self._inboxes.fits(x)

    def _close_inboxes(self) -> None:
        self._inboxes = None
        if self._memory is not None:
            with contextlib.suppress(RuntimeError):  # of a device that has failed there is nothing to give back
                self._memory.close()
            self._memory = None

    # ------------------------------------------------------------------ end

    def abort(self) -> None:
        """Break off whatever collective this rank waits in; what that gives is no sum, and the group is of no use then.

        For another thread than the one that waits. Does not return while a CUDA graph with NCCL in it exists. On gloo a
        collective ends when the connections do, with the death of a peer.
        """
        inboxes, pg = self._inboxes, self._pg
        if inboxes is not None:
            inboxes.break_off()
        if hasattr(pg, "abort") and not self._is_aborted:
            self._is_aborted = True
            pg.abort()

    def close(self) -> None:
        """Give back what the group holds on the device. CUDA graphs with collectives in them have to be gone."""
        self.abort()
        self._close_inboxes()
        self._pg = None


def _in_stream(options: Any) -> Any:
    """Have NCCL run in the current stream, which saves two events a call; torch before 2.7 cannot."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


SINGLE = Group()


def divide(what: str, total: int, parts: int) -> int:
    """`total / parts`, or ValueError that says which dimension does not split over the ranks."""
    if total % parts:
        raise ValueError(f"{what}={total} does not divide by tensor_parallel_size={parts}; use one that divides it")
    return total // parts
