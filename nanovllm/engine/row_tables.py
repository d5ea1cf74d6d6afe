"""What the device knows about each running sequence, one line ("row") per sequence.

The scheduler gives every running sequence a row; the `ModelRunner` keeps these tables in step with it from the
differences that a `Batch` carries. Since the last sampled token lives here too, a decode step needs nothing from the
host but rows and positions, and can be launched before the previous step's tokens have reached the host.
"""

from typing import Any

import numpy as np
import torch

from nanovllm.engine.scheduler import Batch


def upload(data: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy host data to the device without waiting.

    The pinned staging buffer comes from torch's caching host allocator, which does not reuse it before the copy is
    done; so the caller keeps nothing alive.
    """
    if device.type != "cuda":
        return torch.as_tensor(data, dtype=dtype)
    return torch.as_tensor(data, dtype=dtype).pin_memory().to(device, non_blocking=True)


class RowTables:
    """Device tables of `num_rows` lines, and one more that padding rows of a CUDA graph may read and write."""

    def __init__(self, num_rows: int, max_num_blocks: int, device: torch.device) -> None:
        self.device = device
        self.pad_row = num_rows
        self.max_num_blocks = max_num_blocks
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(num_rows + 1, max_num_blocks, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(num_rows + 1, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        # Host copies: prefill computes its slots from the block table, the sampler's path hangs on the temperatures.
        self.block_tables_host = np.zeros((num_rows + 1, max_num_blocks), dtype=np.int32)
        self.temperatures_host = [0.0] * (num_rows + 1)

    def update(self, batch: Batch) -> None:
        """Enter the batch's new rows and blocks; ordered on the stream before the step that needs them."""
        if batch.new_rows:
            rows, temperatures, seeds = zip(*batch.new_rows, strict=True)
            for row, temperature in zip(rows, temperatures, strict=True):
                self.temperatures_host[row] = temperature
            index = upload(rows, torch.int64, self.device)
            self.temperatures[index] = upload(temperatures, torch.float32, self.device)
            self.seeds[index] = upload(seeds, torch.int64, self.device)
        if batch.new_blocks:
            cells: list[int] = []
            values: list[int] = []
            for row, first, block_ids in batch.new_blocks:
                self.block_tables_host[row, first : first + len(block_ids)] = block_ids
                start = row * self.max_num_blocks + first
                cells.extend(range(start, start + len(block_ids)))
                values.extend(block_ids)
            index = upload(cells, torch.int64, self.device)
            self.block_tables.view(-1)[index] = upload(values, torch.int32, self.device)

    def all_greedy(self, rows: list[int]) -> bool:
        return all(self.temperatures_host[row] == 0.0 for row in rows)
