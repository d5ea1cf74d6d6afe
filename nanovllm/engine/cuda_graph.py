"""CUDA graphs of the decode step.

A decode step launches a few hundred small kernels; a graph replays them with one launch. The `ModelRunner` captures
the step for a ladder of batch sizes and replays the smallest that fits, padded with rows that compute nothing.
"""

from collections.abc import Callable

import torch

MAX_GRAPH_SIZE = 512


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, every 16, and `max_num_seqs`; at most 512, above which steps run eagerly."""
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    return sorted({size for size in (1, 2, 4, 8, *range(16, largest, 16)) if size < largest} | {largest})


class DecodeGraphs:
    """Captured decode steps over one set of static inputs.

    `step(rows, positions)` must be capturable: static shapes, no wait for the device. The inputs are slices of one
    buffer that `replay` overwrites; the output of a replay stands in the graph's own memory until the next replay.
    """

    def __init__(
        self,
        step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
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
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
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
                output = self.step(rows, positions)
            self.pool = self.pool or graph.pool()
            self.graphs[size] = (graph, output)
        self.sizes = sorted(self.graphs)

    def size_for(self, num_seqs: int) -> int | None:
        """The smallest captured size that holds `num_seqs`, None if there is none."""
        return next((size for size in self.sizes if size >= num_seqs), None)

    def replay(self, rows: list[int], positions: list[int]) -> torch.Tensor:
        """Run one step; returns the captured step's output, cut to the real rows."""
        size = self.size_for(len(rows))
        assert size is not None, (len(rows), self.sizes)
        num_pad = size - len(rows)
        # pin_memory() draws a fresh buffer from the caching host allocator, which is not reused before this copy is
        # done: a step may be prepared while the one before it still runs.
        staged = torch.tensor([rows + [self.pad_row] * num_pad, positions + [-1] * num_pad], device="cpu").pin_memory()
        self.inputs[:, :size].copy_(staged, non_blocking=True)
        graph, output = self.graphs[size]
        graph.replay()
        return output[: len(rows)]
