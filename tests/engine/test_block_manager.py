"""BlockManager: who shares what, what is recycled when, and that a hash is never believed."""

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def make(token_ids: list[int], block_size: int = 4) -> Sequence:
    return Sequence(0, token_ids, SamplingParams(), max_tokens=1000, block_size=block_size)


def compute(blocks: BlockManager, seq: Sequence) -> None:
    """All known tokens of `seq` have been computed: what the scheduler does when a prefill step is settled."""
    before = seq.num_computed_tokens
    seq.num_scheduled_tokens = seq.num_computed_tokens = seq.num_tokens
    blocks.register_blocks(seq, before)


def admit(blocks: BlockManager, token_ids: list[int]) -> Sequence:
    seq = make(token_ids, blocks.block_size)
    assert blocks.can_allocate(seq)
    blocks.allocate(seq)
    compute(blocks, seq)
    return seq


def run(blocks: BlockManager, token_ids: list[int]) -> Sequence:
    """Admit, compute and release; what it was given is still to be read from `num_cached_tokens`."""
    seq = admit(blocks, token_ids)
    blocks.release(seq)
    return seq


A = [1, 2, 3, 4, 5, 6, 7, 8, 9]  # two full blocks of 4, and one token
JUNK = [60, 61, 62, 63, 64, 65, 66, 67]


# ---------------------------------------------------------------------- blocks while decoding


@pytest.mark.parametrize(
    ("length", "needs_block"), [(255, False), (256, False), (257, True), (258, False), (513, True)]
)
def test_a_block_is_needed_for_the_first_position_of_a_block(length: int, needs_block: bool) -> None:
    """Counted once the sampled token has been appended: 256 tokens fit, the 257th needs a block."""
    blocks = BlockManager(4, 256)
    seq = make(list(range(length - 1)), 256)
    blocks.allocate(seq)
    compute(blocks, seq)
    seq.append_token(7)
    assert blocks.needs_block(seq) is needs_block is (len(seq) % 256 == 1)
    if needs_block:
        assert blocks.append_block(seq) == seq.block_table[-1]
    assert len(seq.block_table) == seq.num_blocks
    blocks.check_invariants([seq])


def test_a_block_filled_by_decoding_is_shared() -> None:
    blocks = BlockManager(8, 4)
    seq = admit(blocks, A[:7])
    seq.append_token(8)
    assert run(blocks, A).num_cached_tokens == 4, "the eighth token is known, but not computed"
    compute(blocks, seq)
    assert run(blocks, A).num_cached_tokens == 8


# ---------------------------------------------------------------------- sharing


def test_running_sequences_share_full_blocks_and_nothing_else() -> None:
    blocks = BlockManager(8, 4)
    first, second = admit(blocks, A), admit(blocks, A)
    assert second.num_cached_tokens == second.num_computed_tokens - 1 == 8
    assert second.block_table[:2] == first.block_table[:2] and second.block_table[2] != first.block_table[2]
    assert [blocks.blocks[i].ref_count for i in (*first.block_table, second.block_table[2])] == [2, 2, 1, 1]
    assert blocks.num_free_blocks == 4
    blocks.check_invariants([first, second])
    blocks.release(first)
    assert [blocks.blocks[i].ref_count for i in second.block_table] == [1, 1, 1]
    blocks.check_invariants([second])
    blocks.release(second)
    assert blocks.num_free_blocks == 8 and not blocks.used_block_ids


def test_the_first_miss_ends_the_sharing() -> None:
    blocks = BlockManager(16, 4)
    run(blocks, A)
    assert run(blocks, [*A[:4], 0, *A[5:]]).num_cached_tokens == 4
    assert run(blocks, [0, *A[1:]]).num_cached_tokens == 0


def test_equal_blocks_behind_different_prefixes_are_not_shared() -> None:
    blocks = BlockManager(16, 4)
    run(blocks, [1, 1, 1, 1, 5, 5, 5, 5, 0])
    assert run(blocks, [2, 2, 2, 2, 5, 5, 5, 5, 0]).num_cached_tokens == 0
    assert run(blocks, [5, 5, 5, 5, 0]).num_cached_tokens == 0


@pytest.mark.parametrize(("length", "num_cached"), [(255, 0), (256, 0), (257, 256), (511, 256), (512, 256), (513, 512)])
def test_the_last_token_of_a_prompt_is_always_computed(length: int, num_cached: int) -> None:
    blocks = BlockManager(8, 256)
    prompt = list(range(length))
    assert run(blocks, prompt).num_cached_tokens == 0
    assert run(blocks, prompt).num_cached_tokens == num_cached
    assert num_cached == (length - 1) // 256 * 256


def test_nothing_is_shared_before_it_is_computed() -> None:
    """Pitfall 24: the blocks of a prompt are registered one by one as its chunks are settled."""
    blocks = BlockManager(12, 4)
    first = make(A)
    blocks.allocate(first)
    assert blocks.cached_prefix(make(A)) == []
    for num_computed, num_shared in [(3, 0), (4, 1), (7, 1), (9, 2)]:
        before, first.num_computed_tokens = first.num_computed_tokens, num_computed
        blocks.register_blocks(first, before)
        assert blocks.cached_prefix(make(A)) == first.block_table[:num_shared]


def test_the_same_prefix_computed_side_by_side() -> None:
    """Both keep their own blocks, the first ones are found, and what follows either of them is shared."""
    blocks = BlockManager(12, 4)
    first, second = make(A[:5]), make(A)
    for seq in (first, second):
        blocks.allocate(seq)
    for seq in (first, second):
        compute(blocks, seq)
    assert not set(first.block_table) & set(second.block_table)
    third = admit(blocks, A)
    assert third.block_table[:2] == [first.block_table[0], second.block_table[1]]
    blocks.check_invariants([first, second, third])
    for seq in (first, second, third):
        blocks.release(seq)
    assert blocks.num_free_blocks == 12


def test_no_sharing_without_prefix_caching() -> None:
    blocks = BlockManager(8, 4, enable_prefix_caching=False)
    assert [run(blocks, A).num_cached_tokens for _ in range(2)] == [0, 0]
    assert blocks.hash_to_block_id == {}


# ---------------------------------------------------------------------- hashes


def test_the_hash_names_the_whole_prefix() -> None:
    root = BlockManager.compute_hash([1, 2, 3, 4])
    hashes = [
        root,
        BlockManager.compute_hash([1, 2, 3, 4], prefix=root),
        BlockManager.compute_hash([1, 2, 3, 4], prefix=root + 1),
        BlockManager.compute_hash([1, 2, 4, 3]),
    ]
    assert len(set(hashes)) == 4
    assert BlockManager.compute_hash([1, 2, 3, 4], prefix=root) == hashes[1]


def test_a_constant_hash_shares_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall 32: with every hash equal, only contents and parents tell blocks apart."""
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda token_ids, prefix=None: 42))
    blocks = BlockManager(16, 4)
    first = admit(blocks, [5, 5, 5, 5, 0])
    assert run(blocks, [5, 5, 5, 5, 0]).num_cached_tokens == 4, "the true content is still found"
    assert run(blocks, [6, 5, 5, 5, 0]).num_cached_tokens == 0, "other content is not"
    second = admit(blocks, [5, 5, 5, 5, 6, 6, 6, 6, 0])  # its second block is now what the one hash points to
    assert blocks.hash_to_block_id == {42: second.block_table[1]}
    assert run(blocks, [6, 6, 6, 6, 0]).num_cached_tokens == 0, "the content is right, its parent is not"
    blocks.check_invariants([first, second])
    for seq in (first, second):
        blocks.release(seq)
    assert blocks.num_free_blocks == 16


def test_a_hash_blind_to_the_prefix_shares_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third blocks are equal, hash and all; what tells them apart is the second block before each."""
    own_hash = BlockManager.compute_hash
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda token_ids, prefix=None: own_hash(token_ids)))
    blocks = BlockManager(16, 4)
    one, other = ([1, 1, 1, 1, second, 2, 2, 2, 3, 3, 3, 3, 0] for second in (5, 6))
    assert run(blocks, one).num_cached_tokens == 0
    assert run(blocks, one).num_cached_tokens == 12
    assert run(blocks, other).num_cached_tokens == 4
    assert run(blocks, one).num_cached_tokens == 8, "the third block that is found now belongs to the other"


# ---------------------------------------------------------------------- recycling


def test_blocks_of_a_finished_sequence_are_revived() -> None:
    """Pitfall 26: the hash survives the release, and a hit takes the block out of the middle of the queue."""
    blocks = BlockManager(8, 4)
    seq = admit(blocks, A)
    table = list(seq.block_table)
    blocks.release(seq)
    other = admit(blocks, JUNK)
    again = admit(blocks, A)
    assert again.num_cached_tokens == 8 and again.block_table[:2] == table[:2]
    assert not set(again.block_table) & set(other.block_table)
    blocks.check_invariants([again, other])


def test_a_recycled_block_is_forgotten() -> None:
    """Pitfall 25: once junk has gone through every block, nothing of A is found."""
    blocks = BlockManager(3, 4)
    run(blocks, A)
    run(blocks, [*JUNK, 68, 69, 70, 71])
    again = admit(blocks, A)
    assert again.num_cached_tokens == 0
    blocks.check_invariants([again])


def test_a_recycled_block_takes_only_its_own_mapping_along() -> None:
    blocks = BlockManager(5, 4)
    twins = [make(A[:5]), make(A[:5])]
    for seq in twins:
        blocks.allocate(seq)
    for seq in twins:
        compute(blocks, seq)
    found, twin = (seq.block_table[0] for seq in twins)
    assert blocks.hash_to_block_id[blocks.blocks[twin].hash] == found
    blocks.release(twins[1])
    junk = admit(blocks, [*JUNK, 0])  # takes the free block and both of the released ones
    assert twin in junk.block_table
    assert blocks.cached_prefix(make(A[:5])) == [found]
    blocks.check_invariants([twins[0], junk])


def test_free_blocks_are_handed_out_oldest_first_and_tails_before_heads() -> None:
    blocks = BlockManager(6, 4)
    seq = admit(blocks, A)
    assert seq.block_table == [0, 1, 2]
    blocks.release(seq)
    assert list(blocks.free_block_ids) == [2, 3, 4, 5, 1, 0]  # 2 is not full: nobody could find it
    # Five new blocks leave the head of A: a shorter hit, but a hit.
    blocks.release(admit(blocks, [*JUNK, *JUNK, 0]))
    assert blocks.cached_prefix(make(A)) == [0]


def test_no_prefix_is_forgotten_while_there_are_blocks_that_hold_none() -> None:
    blocks = BlockManager(4, 4)
    run(blocks, A)
    for _ in range(5):
        assert run(blocks, [9, 9, 9]).num_cached_tokens == 0
    assert blocks.cached_prefix(make(A)) == [0, 1]
    blocks.reset_prefix_cache()
    assert list(blocks.free_block_ids)[:2] == [1, 0], "what has been used is used again, before memory never touched"
    blocks.check_invariants([])


def test_shared_blocks_are_secured_before_new_ones_are_taken() -> None:
    """The oldest free block is the one that the newcomer shares: taking new blocks first would recycle it."""
    blocks = BlockManager(3, 4)
    run(blocks, A)
    blocks.free_block_ids.move_to_end(0, last=False)
    again = admit(blocks, A)
    assert again.block_table[:2] == [0, 1] and again.num_cached_tokens == 8
    blocks.check_invariants([again])


def test_can_allocate_counts_revived_blocks_as_taken() -> None:
    blocks = BlockManager(4, 4)
    seq = admit(blocks, A)
    assert blocks.can_allocate(make(A)), "two blocks are shared in use, the third is free"
    assert not blocks.can_allocate(make(JUNK))
    blocks.release(seq)
    blocker = admit(blocks, JUNK[:4])  # one block; A's two full ones are free, and needed with one more
    assert blocks.num_free_blocks == 3 and blocks.can_allocate(make(A))
    blocks.append_block(blocker)
    assert blocks.num_free_blocks == 2 and not blocks.can_allocate(make(A))


def test_reset_forgets_what_is_cached_and_spares_what_runs() -> None:
    blocks = BlockManager(8, 4)
    finished, running = [*JUNK, 0], admit(blocks, A)
    run(blocks, finished)
    blocks.reset_prefix_cache()
    assert blocks.cached_prefix(make(A)) == blocks.cached_prefix(make(finished)) == []
    # What it goes on to fill stands behind a prefix that has been forgotten, and is not shared either.
    for token in (10, 11, 12):
        running.append_token(token)
        compute(blocks, running)
    assert blocks.hash_to_block_id == {}
    blocks.check_invariants([running])
    # A new one starts over.
    assert run(blocks, A).num_cached_tokens == 0
    assert run(blocks, A).num_cached_tokens == 8
    blocks.release(running)
    assert blocks.num_free_blocks == 8


def test_reset_leaves_no_trace_in_blocks_recycled_later() -> None:
    """A sequence that ran through the reset gets blocks of a prefix cached since, and its own stay unshared."""
    blocks = BlockManager(6, 4)
    running = admit(blocks, A)
    blocks.reset_prefix_cache()
    run(blocks, [*JUNK, 0])
    for token in range(10, 25):
        running.append_token(token)
        if blocks.needs_block(running):
            blocks.append_block(running)
        compute(blocks, running)
    assert running.num_blocks == 6 and blocks.num_free_blocks == 0
    assert blocks.hash_to_block_id == {}
    blocks.check_invariants([running])
