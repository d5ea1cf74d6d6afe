"""Where a tile of consecutive tokens lives in the paged cache; shared by the attention kernels."""

import triton
import triton.language as tl


@triton.jit
def tile_slots(block_table_ptr, start, end, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Cache slots, [TILE] int64, of the tokens start .. start + TILE of one sequence; `start` is a multiple of TILE.

    Slots of tokens at or past `end` mean nothing and must not be read; the table is not read for them either.
    """
    offsets = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:  # the whole tile is in one block: one scalar look-up
        block = tl.load(block_table_ptr + start // BLOCK_SIZE).to(tl.int64)
        slots = block * BLOCK_SIZE + start % BLOCK_SIZE + offsets
    else:
        token = start + offsets
        block = tl.load(block_table_ptr + token // BLOCK_SIZE, mask=token < end, other=0).to(tl.int64)
        slots = block * BLOCK_SIZE + token % BLOCK_SIZE
    return slots
