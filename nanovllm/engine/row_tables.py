"""What the device knows about each running sequence, one line ("row") per sequence.

The scheduler gives every running sequence a row; the `ModelRunner` keeps these tables in step with it from the
differences that a `Batch` carries. Since the last sampled token lives here too, a decode step needs nothing from the
host but rows and positions, and can be launched before the previous step's tokens have reached the host.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.scheduler import Batch


def upload(data: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host data as a tensor on the device, without waiting for the copy. (On a CPU an array may be taken as it is.)

    The pinned staging buffer comes from torch's caching host allocator, which does not reuse it before the copy is
    done; so the caller keeps nothing alive.
    """
    host = torch.as_tensor(np.asarray(data), dtype=dtype, device="cpu")  # numpy reads a list ten times as fast as torch
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class DecodeInputs(NamedTuple):
    """All that a decode step of B sequences reads, looked up from rows and positions."""

    input_ids: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [B] int64; 0 in a padding row
    slot_mapping: torch.Tensor  # [B] int32; -1 in a padding row
    context_lens: torch.Tensor  # [B] int32; 0 in a padding row
    block_tables: torch.Tensor  # [B, W] int32; undefined past a length
    temperatures: torch.Tensor  # [B] float32
    seeds: torch.Tensor  # [B] int64


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

    def decode_inputs(self, rows: torch.Tensor, positions: torch.Tensor, block_size: int) -> DecodeInputs:
        """Look up a decode step's inputs; rows, positions [B] int64, position -1 in a padding row."""
        if rows.is_cuda:
            from nanovllm.kernels.prepare_decode import prepare_decode

            tables = (self.last_tokens, self.block_tables, self.temperatures, self.seeds)
            return DecodeInputs(*prepare_decode(rows, positions, *tables, block_size))
        return self.decode_inputs_plain(rows, positions, block_size)

    def decode_inputs_plain(self, rows: torch.Tensor, positions: torch.Tensor, block_size: int) -> DecodeInputs:
        """The plain form, on any device."""
        safe_positions = positions.clamp(min=0)
        block_tables = self.block_tables.index_select(0, rows)
        blocks = block_tables.gather(1, (safe_positions // block_size).unsqueeze(1)).squeeze(1)
        slots = blocks * block_size + safe_positions % block_size
        return DecodeInputs(
            input_ids=self.last_tokens.index_select(0, rows),
            positions=safe_positions,
            slot_mapping=torch.where(positions >= 0, slots, -1).int(),
            context_lens=(positions + 1).int(),
            block_tables=block_tables,
            temperatures=self.temperatures.index_select(0, rows),
            seeds=self.seeds.index_select(0, rows),
        )

    def all_greedy(self, rows: list[int]) -> bool:
        return all(self.temperatures_host[row] == 0.0 for row in rows)
