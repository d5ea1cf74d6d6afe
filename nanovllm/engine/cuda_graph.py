"""CUDA graphs of the decode step.

A decode step launches a few hundred small kernels; a graph replays them with one launch. The `ModelRunner` captures
the step for a ladder of batch sizes and replays the smallest that fits, padded with rows that compute nothing.
"""

from collections.abc import Callable

import numpy as np
import torch

MAX_GRAPH_SIZE = 512


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, every 16, and `max_num_seqs`; at most 512, above which steps run eagerly."""
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    return sorted({size for size in (1, 2, 4, 8, *range(16, largest, 16)) if size < largest} | {largest})


class DecodeGraphs:
    """Captured decode steps over one set of static inputs.

    `step(rows, positions)`, which returns (ids [B], logits or None), must be capturable: static shapes, no wait for the
    device. The inputs are slices of one buffer that `replay` overwrites. The outputs of a replay stand in memory of the
    graphs' pool until the next replay of any of them. Ids are kept apart for each graph; the logits of all graphs
    share their memory, since keeping a tensor would keep others from its place: 2.5 GB for 0.6B's vocabulary.
    """

    def __init__(
        self,
        step: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]],
        max_size: int,
        pad_row: int,
        device: torch.device,
    ) -> None:
        self.step = step
        self.pad_row = pad_row
        self.inputs = torch.empty(2, max_size, dtype=torch.int64, device=device)  # rows, positions
        self.inputs[0] = pad_row
        self.inputs[1] = -1
        self.pool: tuple[int, int] | None = None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor | None]] = {}
        self.sizes: list[int] = []

    def capture(self, sizes: list[int]) -> None:
        """Capture the given sizes, largest first: the smaller ones then fit into the memory of the first."""
        stream = torch.cuda.Stream()
        for size in sorted(sizes, reverse=True):
            rows, positions = self.inputs[:, :size]
            # Once without a graph: kernels compile and libraries set up their workspaces, which capture forbids.
            self.step(rows, positions)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # What other threads do meanwhile, NCCL's for one, is none of this capture's business.
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                ids, logits = self.step(rows, positions)
            self.pool = self.pool or graph.pool()
            self.graphs[size] = (graph, ids, None if logits is None else unowned(logits))
            del logits
        self.sizes = sorted(self.graphs)

    def size_for(self, num_seqs: int) -> int | None:
        """The smallest captured size that holds `num_seqs`, None if there is none."""
        return next((size for size in self.sizes if size >= num_seqs), None)

    def replay(self, rows: list[int], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one step; returns the ids, cut to the real rows, and the logits as they are."""
        size = self.size_for(len(rows))
        assert size is not None, (len(rows), self.sizes)
        num_pad = size - len(rows)
        # pin_memory() draws a fresh buffer from the caching host allocator, which is not reused before this copy is
        # done: a step may be prepared while the one before it still runs.
        lines = np.array([rows + [self.pad_row] * num_pad, positions + [-1] * num_pad], dtype=np.int64)
        staged = torch.from_numpy(lines).pin_memory()
        self.inputs[:, :size].copy_(staged, non_blocking=True)
        graph, ids, logits = self.graphs[size]
        graph.replay()
        return ids[: len(rows)], logits


class _Memory:
    """A tensor's memory under the CUDA array interface, in place of the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"<i{size}",  # the interface has no bfloat16
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a claim to it: whoever gave the memory may give it to others when `tensor` is gone.

    Memory of a graph's pool stays mapped as long as the graph lives, and between two replays nobody writes to it.
    """
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
