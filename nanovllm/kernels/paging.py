"""Where a tile of consecutive tokens lives in the paged cache; shared by the attention kernels.

In two steps, so that a loop over tiles can look up the blocks of its next tile while it computes: else the latency of
the look-up would come before every load of keys.
"""

import triton
import triton.language as tl


@triton.jit
def load_blocks(block_table_ptr, start, end, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block ids of the tokens start .. start + TILE of one sequence; `start` is a multiple of TILE.

    One id if a tile never straddles two blocks, else one per token, [TILE]. The table is not read at or past `end`.
    """
    if BLOCK_SIZE % TILE == 0:
        blocks = tl.load(block_table_ptr + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        token = start + tl.arange(0, TILE)
        blocks = tl.load(block_table_ptr + token // BLOCK_SIZE, mask=token < end, other=0)
    return blocks


@triton.jit
def token_slots(blocks, start, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Cache slots, [TILE] int64, of the tokens start .. start + TILE, whose `blocks` came from load_blocks."""
    return blocks.to(tl.int64) * BLOCK_SIZE + (start + tl.arange(0, TILE)) % BLOCK_SIZE
