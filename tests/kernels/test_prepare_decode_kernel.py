"""The decode metadata of the kernel against the plain form of `RowTables`."""

import pytest
import torch

from nanovllm.engine.row_tables import RowTables
from nanovllm.engine.scheduler import Batch
from nanovllm.kernels.prepare_decode import prepare_decode


@pytest.mark.parametrize("block_size", [16, 256])
def test_prepare_decode(block_size: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    width = 40
    tables = RowTables(8, width, device)
    batch = Batch(is_prefill=False)
    for row in range(8):
        batch.new_rows.append((row, row / 8, 2**62 + row))
        batch.new_blocks.append((row, 0, torch.randint(1 << 20, (width,), generator=generator).tolist()))
    tables.update(batch)
    tables.last_tokens[:8] = torch.arange(8, device=device) + 100

    rows = torch.tensor([5, 0, 7, 3, tables.pad_row, 1], device=device)
    last = width * block_size - 1
    positions = torch.tensor([0, block_size - 1, block_size, last, -1, 3 * block_size + 7], device=device)
    expected = tables.decode_inputs_plain(rows, positions, block_size)
    state = (tables.last_tokens, tables.block_tables, tables.temperatures, tables.seeds)
    actual = prepare_decode(rows, positions, *state, block_size)
    for name, ours, plain in zip(expected._fields, actual, expected, strict=True):
        assert ours.dtype == plain.dtype, name
        if name == "block_tables":  # past its length a row of the table is undefined
            for row, position in enumerate(positions.tolist()):
                used = position // block_size + 1
                assert ours[row, :used].tolist() == plain[row, :used].tolist(), row
        else:
            assert torch.equal(ours, plain), name
    assert actual[2].tolist()[4] == -1
    assert actual[3].tolist()[4] == 0
