"""All the metadata of a decode step in one kernel; called by `RowTables.decode_inputs`.

The host gives a row and a position for each sequence. Everything else is in the row tables; looking it up is a dozen
one-microsecond kernels in PyTorch, and every step of every graph would replay them.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs


# The scalars are loaded one by one: where they lie makes no difference, and must not make another compiled kernel.
@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "positions_ptr"])
def _prepare_decode_kernel(
    input_ids_ptr,  # [B] int64, out
    positions_out_ptr,  # [B] int64, out
    slot_mapping_ptr,  # [B] int32, out
    context_lens_ptr,  # [B] int32, out
    block_tables_out_ptr,  # [B, W] int32, out
    temperatures_out_ptr,  # [B] float32, out
    seeds_out_ptr,  # [B] int64, out
    rows_ptr,  # [B] int64
    positions_ptr,  # [B] int64, -1 in a padding row
    last_tokens_ptr,  # [rows] int64
    block_tables_ptr,  # [rows, W] int32
    temperatures_ptr,  # [rows] float32
    seeds_ptr,  # [rows] int64
    W: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i)
    position = tl.load(positions_ptr + i)
    is_real = position >= 0
    table_ptr = block_tables_ptr + row * W
    safe_position = tl.maximum(position, 0)
    block = tl.load(table_ptr + safe_position // BLOCK_SIZE)
    slot = block * BLOCK_SIZE + (safe_position % BLOCK_SIZE).to(tl.int32)
    tl.store(input_ids_ptr + i, tl.load(last_tokens_ptr + row))
    tl.store(positions_out_ptr + i, safe_position)
    tl.store(slot_mapping_ptr + i, tl.where(is_real, slot, -1))
    tl.store(context_lens_ptr + i, (position + 1).to(tl.int32))
    tl.store(temperatures_out_ptr + i, tl.load(temperatures_ptr + row))
    tl.store(seeds_out_ptr + i, tl.load(seeds_ptr + row))
    # Only the blocks that hold tokens: nobody reads the table past the length.
    num_blocks = (position // BLOCK_SIZE + 1).to(tl.int32)
    for first in range(0, num_blocks, CHUNK):
        column = first + tl.arange(0, CHUNK)
        mask = column < num_blocks
        tl.store(block_tables_out_ptr + i * W + column, tl.load(table_ptr + column, mask=mask, other=0), mask=mask)


def prepare_decode(
    rows: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    """rows, positions [B] int64 (position -1: padding) and the row tables.

    Returns the fields of `row_tables.DecodeInputs`, in order.
    """
    batch, width = len(rows), block_tables.shape[1]
    assert block_tables.is_contiguous() and rows.is_contiguous() and positions.is_contiguous()
    int64, int32, float32 = torch.int64, torch.int32, torch.float32
    # Not slices of one tensor: the kernels that read them are compiled for aligned pointers.
    dtypes = (int64, int64, int32, int32, int32, float32, int64)
    outputs = [torch.empty(batch, dtype=dtype, device=rows.device) for dtype in dtypes]
    outputs[4] = torch.empty((batch, width), dtype=int32, device=rows.device)
    launch(
        _prepare_decode_kernel,
        (batch,),
        *outputs,
        rows,
        positions,
        last_tokens,
        block_tables,
        temperatures,
        seeds,
        W=width,
        BLOCK_SIZE=block_size,
        CHUNK=32,
        num_warps=1,
        **pdl_options(rows.device),
    )
    return tuple(outputs)
