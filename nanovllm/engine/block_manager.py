"""The KV cache's book-keeping: which block belongs to whom, and which prefix lies in which block.

The `Scheduler` asks it for blocks and gives them back; nobody else does, but for `reset_prefix_cache`. It never sees
the cache itself, only block ids, so it is plain Python and runs without torch. A block is always in exactly one of two
places:

    free_block_ids (FIFO, oldest first) --allocate, or revive on a prefix hit--> used_block_ids (ref_count >= 1)
                                        <--------- release, last block first ---

A released block keeps its contents and its hash at the back of the queue; both are forgotten only when the block is
handed out for new content. That is the whole of the prefix cache. A block that nobody could find, since it is not full
or the twin of another one, goes to the front: no cached prefix is given up for it, and its memory is still warm.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import count

import numpy as np
import xxhash

from nanovllm.engine.sequence import Sequence

ROOT = 0  # prefix_id of the empty prefix
UNREGISTERED = -1


class Block:
    """One block of the pool.

    A registered block (full, its K/V computed) knows its tokens, the identity of the prefix that ends with it
    (`prefix_id`) and of the one before it. Identities are handed out one per distinct prefix, so comparing tokens and
    `parent_id` compares the whole prefix exactly, however the hash collides.
    """

    __slots__ = ("block_id", "ref_count", "hash", "token_ids", "prefix_id", "parent_id")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.forget()

    def forget(self) -> None:
        self.hash: int | None = None
        self.token_ids: list[int] = []
        self.prefix_id = UNREGISTERED
        self.parent_id = UNREGISTERED


class BlockManager:
    """Reference-counted blocks with prefix caching by content hash."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        assert num_blocks > 0 and block_size > 0, (num_blocks, block_size)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        # An ordered dict is a FIFO from whose middle a block can be revived in O(1).
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.used_block_ids: set[int] = set()
        self.hash_to_block_id: dict[int, int] = {}
        self._prefix_ids = count(ROOT + 1)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_block_ids)

    @staticmethod
    def compute_hash(token_ids: list[int], prefix: int | None = None) -> int:
        """xxhash64 over the hash of the block before and the block's own ids: it names the whole prefix."""
        h = xxhash.xxh64()
        if prefix is not None:
            h.update(prefix.to_bytes(8, "little"))
        h.update(np.array(token_ids, dtype=np.int64).tobytes())
        return h.intdigest()

    def _hash_of(self, seq: Sequence, index: int) -> int:
        while len(seq.block_hashes) <= index:
            i = len(seq.block_hashes)
            prefix = seq.block_hashes[-1] if i else None
            seq.block_hashes.append(self.compute_hash(seq.block(i), prefix))
        return seq.block_hashes[index]

    def _lookup(self, hash_: int, token_ids: list[int], parent_id: int) -> Block | None:
        """The registered block with this content behind this prefix. A hash alone is never believed."""
        block_id = self.hash_to_block_id.get(hash_)
        if block_id is None:
            return None
        block = self.blocks[block_id]
        return block if block.parent_id == parent_id and block.token_ids == token_ids else None

    def cached_prefix(self, seq: Sequence) -> list[int]:
        """Ids of the blocks that hold the start of `seq`, in order.

        At most `(len - 1) // block_size` of them: the last token is always computed, since its logits are wanted. None
        if the logits of the whole prompt are.
        """
        if not self.enable_prefix_caching or seq.wants_prompt_logprobs:
            return []
        found: list[int] = []
        parent_id = ROOT
        for i in range((seq.num_tokens - 1) // self.block_size):
            block = self._lookup(self._hash_of(seq, i), seq.block(i), parent_id)
            if block is None:
                break
            found.append(block.block_id)
            parent_id = block.prefix_id
        return found

    def can_allocate(self, seq: Sequence) -> bool:
        """Whether blocks for all known tokens of `seq` are to be had; a cached block that is free counts as one."""
        cached = self.cached_prefix(seq)
        num_in_use = sum(self.blocks[i].ref_count > 0 for i in cached)
        return seq.num_blocks - num_in_use <= self.num_free_blocks

    def allocate(self, seq: Sequence) -> None:
        """Give `seq` blocks for all its known tokens, shared ones for the part that is cached."""
        assert not seq.block_table, seq
        # The shared blocks first: once they are in use, taking new ones cannot recycle them.
        for block_id in self.cached_prefix(seq):
            self._share(block_id)
            seq.block_table.append(block_id)
        seq.num_cached_tokens = seq.num_computed_tokens = seq.num_scheduled_tokens = (
            len(seq.block_table) * self.block_size
        )
        while len(seq.block_table) < seq.num_blocks:
            seq.block_table.append(self._take_free())

    def needs_block(self, seq: Sequence) -> bool:
        """Whether decoding the next position of `seq` takes a new block: whether it is the first of a block.

        With 256-token blocks position 256 needs one and 255 and 257 do not. Counted once the sampled token has been
        appended, that is `len(seq) % block_size == 1`: a length of 257 needs a block, 256 does not.
        """
        return seq.num_scheduled_tokens % self.block_size == 0

    def append_block(self, seq: Sequence) -> int:
        """Give `seq` one more block for the position about to be computed; the caller has seen that one is free."""
        assert len(seq.block_table) * self.block_size == seq.num_scheduled_tokens, seq
        seq.block_table.append(self._take_free())
        return seq.block_table[-1]

    def register_blocks(self, seq: Sequence, num_computed_before: int) -> None:
        """Make the blocks of `seq` that became full and computed since `num_computed_before` tokens shareable."""
        if not self.enable_prefix_caching:
            return
        for i in range(num_computed_before // self.block_size, seq.num_computed_tokens // self.block_size):
            parent_id = self.blocks[seq.block_table[i - 1]].prefix_id if i else ROOT
            if parent_id == UNREGISTERED:  # the cache was reset under a running sequence
                return
            block, token_ids, hash_ = self.blocks[seq.block_table[i]], seq.block(i), self._hash_of(seq, i)
            known = self._lookup(hash_, token_ids, parent_id)
            block.hash, block.token_ids, block.parent_id = hash_, token_ids, parent_id
            # Two sequences may compute the same prefix side by side: both blocks get one identity, the first one
            # stays the one that is found.
            block.prefix_id = known.prefix_id if known else next(self._prefix_ids)
            if known is None:
                self.hash_to_block_id[hash_] = block.block_id

    def release(self, seq: Sequence) -> None:
        """Take all blocks back, last to first, so that the tail of a prefix is recycled before its head."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            assert block.ref_count >= 0, (seq, block_id)
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids[block_id] = None
                if self.hash_to_block_id.get(block.hash) != block_id:  # nobody could find it
                    self.free_block_ids.move_to_end(block_id, last=False)
        seq.block_table.clear()

    def reset_prefix_cache(self) -> None:
        """Forget all cached contents. Blocks in use stay with their owners and are not shared any more."""
        self.hash_to_block_id.clear()
        for block in self.blocks:
            if block.hash is not None and block.ref_count == 0:
                self.free_block_ids.move_to_end(block.block_id, last=False)
            block.forget()

    def _share(self, block_id: int) -> None:
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free_block_ids[block_id]
            self.used_block_ids.add(block_id)
        block.ref_count += 1

    def _take_free(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        # The mapping may by now point to another block with the same hash, which stays.
        if block.hash is not None and self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
        block.forget()
        block.ref_count = 1
        self.used_block_ids.add(block_id)
        return block_id

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Assert that the books balance, given every sequence that holds blocks. For tests; costs O(pool)."""
        references = [0] * len(self.blocks)
        for seq in sequences:
            for i, block_id in enumerate(seq.block_table):
                references[block_id] += 1
                shared = self.blocks[block_id].ref_count > 1
                computed = (i + 1) * self.block_size <= seq.num_computed_tokens
                assert computed or not shared, f"{seq} shares block {block_id} before its K/V exist"
        assert [b.ref_count for b in self.blocks] == references, "reference counts do not match the block tables"
        assert self.used_block_ids == {i for i, n in enumerate(references) if n}, "used blocks are not those referenced"
        assert not self.used_block_ids & self.free_block_ids.keys(), "a block is both used and free"
        assert len(self.used_block_ids) + len(self.free_block_ids) == len(self.blocks), "a block was lost"
        for hash_, block_id in self.hash_to_block_id.items():
            block = self.blocks[block_id]
            assert block.hash == hash_ and len(block.token_ids) == self.block_size, f"stale hash of block {block_id}"
