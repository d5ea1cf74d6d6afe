"""Scheduler: order, budgets, chunks, preemption, every way out; small cases by hand, then the known hard ones whole.

The tests that `simulate` compare every output with the truth and check that nothing leaks; see `scheduler_harness.py`.
"""

import dataclasses
import pickle
from collections.abc import Callable

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Batch, Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams
from tests.engine.scheduler_harness import Request, simulate

EOS = 99


def make(num_blocks: int = 32, block_size: int = 4, max_num_seqs: int = 8, budget: int = 1000) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        eos_token_ids={EOS},
    )


def add(scheduler: Scheduler, *lengths: int, max_tokens: int = 100, ignore_eos: bool = False) -> list[Sequence]:
    """Queue a sequence for each prompt length; no two prompts begin alike."""
    seqs = []
    for length in lengths:
        seq_id = len(scheduler.waiting) + len(scheduler.running)
        seq = Sequence(
            seq_id,
            [1000 * seq_id + i for i in range(length)],
            SamplingParams(ignore_eos=ignore_eos),
            max_tokens=max_tokens,
            block_size=scheduler.block_manager.block_size,
        )
        scheduler.add(seq)
        seqs.append(seq)
    return seqs


def settle(scheduler: Scheduler, batch: Batch, token_id: int = 7) -> list[tuple[Sequence, int, str | None]]:
    outputs = scheduler.postprocess(batch, [token_id] * sum(batch.samples))
    scheduler.check_invariants()
    return outputs


def step(scheduler: Scheduler, token_id: int = 7) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    settle(scheduler, batch, token_id)
    return batch


def assert_nothing_left(scheduler: Scheduler) -> None:
    assert scheduler.is_finished() and scheduler.schedule() is None
    scheduler.check_invariants()
    assert scheduler.block_manager.num_free_blocks == len(scheduler.block_manager.blocks)
    assert len(scheduler.free_rows) == scheduler.max_num_running


# ---------------------------------------------------------------------- order and budgets


def test_an_empty_scheduler_has_nothing_to_do() -> None:
    assert_nothing_left(make())


def test_prefill_goes_before_decode_and_in_order() -> None:
    scheduler = make()
    first, second = add(scheduler, 5, 3)
    batch = step(scheduler)
    assert batch.is_prefill and batch.seqs == [first, second]
    assert (batch.starts, batch.counts, batch.samples) == ([0, 0], [5, 3], [True, True])
    assert batch.token_ids == [first.prompt_token_ids, second.prompt_token_ids]
    assert not step(scheduler).is_prefill
    (third,) = add(scheduler, 2)
    assert step(scheduler).seqs == [third]
    batch = step(scheduler)
    assert not batch.is_prefill and batch.seqs == [first, second, third]
    assert (batch.starts, batch.counts, batch.token_ids) == ([6, 4, 2], [1, 1, 1], [])


def test_a_small_prompt_does_not_overtake_one_that_has_to_wait() -> None:
    scheduler = make(num_blocks=4)
    (running,) = add(scheduler, 4)
    step(scheduler)
    large, small = add(scheduler, 16, 1)
    assert step(scheduler).seqs == [running], "three blocks are free: enough for the small one, and it waits"
    assert list(scheduler.waiting) == [large, small]


def test_any_sequence_of_a_step_may_be_chunked() -> None:
    scheduler = make(budget=8)
    first, second, third = add(scheduler, 5, 9, 2)
    batches = [step(scheduler) for _ in range(3)]
    assert [(batch.seqs, batch.starts, batch.counts, batch.samples) for batch in batches] == [
        ([first, second], [0, 0], [5, 3], [True, False]),
        ([second, third], [3, 0], [6, 2], [True, True]),
        ([first, second, third], [5, 9, 2], [1, 1, 1], [True, True, True]),
    ]
    assert batches[1].token_ids[0] == second.prompt_token_ids[3:]
    assert [row for row, _, _ in batches[1].new_rows] == [third.row], "a later chunk brings no new row"


def test_a_half_prefilled_sequence_waits_at_the_head_with_its_row_and_blocks() -> None:
    scheduler = make(budget=8)
    (seq,) = add(scheduler, 20)
    assert settle(scheduler, scheduler.schedule()) == [], "a chunk's token is thrown away"
    assert scheduler.waiting[0] is seq and seq.status is SequenceStatus.WAITING
    assert seq.row >= 0 and len(seq.block_table) == 5 and seq.completion_token_ids == []
    step(scheduler)
    step(scheduler)
    assert scheduler.running[0] is seq and seq.completion_token_ids == [7]


def test_no_step_is_over_the_token_budget() -> None:
    """Pitfall 31: budget 512 and 20 prompts of 200."""
    requests = [Request([i + j for j in range(200)], max_tokens=5) for i in range(20)]
    simulation = simulate(requests, num_blocks=40, max_num_batched_tokens=512)
    prefills = [batch for batch in simulation.batches if batch.is_prefill]
    assert [batch.num_tokens for batch in prefills] == [512] * 7 + [416]
    assert simulation.stats["chunks"] >= 4


def test_no_more_sequences_run_than_allowed() -> None:
    """Pitfall 31: max_num_seqs=2 with 100 prompts."""
    requests = [Request([i, i + 1, i + 2], max_tokens=4) for i in range(100)]
    simulation = simulate(requests, num_blocks=100, max_num_seqs=2)
    assert max(len(batch.rows) for batch in simulation.batches) == 2
    assert {row for batch in simulation.batches for row in batch.rows} == {0, 1}


def test_a_decode_step_is_within_the_token_budget_too() -> None:
    requests = [Request([i, i + 1], max_tokens=10) for i in range(12)]
    simulation = simulate(requests, num_blocks=100, max_num_batched_tokens=5)
    assert max(batch.num_tokens for batch in simulation.batches if not batch.is_prefill) == 5


# ---------------------------------------------------------------------- what a batch carries


def test_a_batch_travels_without_its_sequences() -> None:
    scheduler = make()
    add(scheduler, 5, 9)
    for batch in (step(scheduler), step(scheduler)):
        data = pickle.dumps(batch)
        copy = pickle.loads(data)
        assert b"Sequence" not in data and copy.seqs == []
        for name in [field.name for field in dataclasses.fields(Batch) if field.name != "seqs"]:
            assert getattr(copy, name) == getattr(batch, name)


def test_block_tables_travel_by_difference() -> None:
    scheduler = make()
    (seq,) = add(scheduler, 6)
    batch = step(scheduler)
    assert batch.new_rows == [(seq.row, 1.0, 0)] and batch.new_blocks == [(seq.row, 0, seq.block_table)]
    deltas = [step(scheduler).new_blocks for _ in range(4)]  # positions 6 to 9; 8 is the first of the third block
    assert deltas == [[], [], [(seq.row, 2, seq.block_table[2:])], []]


def test_rows_are_used_again() -> None:
    scheduler = make(max_num_seqs=2)
    first, second, third = add(scheduler, 3, 3, 3, max_tokens=2)
    step(scheduler)
    row = first.row
    assert third.row == -1 and {first.row, second.row} == {0, 1}
    scheduler.finish(first, "abort")
    assert step(scheduler).new_rows[0][0] == third.row == row
    step(scheduler)
    assert_nothing_left(scheduler)


# ---------------------------------------------------------------------- endings


def test_a_sequence_stops_at_eos_or_at_its_length() -> None:
    scheduler = make()
    (stopped,) = add(scheduler, 3, max_tokens=2)
    assert settle(scheduler, scheduler.schedule(), EOS) == [(stopped, EOS, "stop")]
    (cut,) = add(scheduler, 3, max_tokens=2, ignore_eos=True)
    assert settle(scheduler, scheduler.schedule(), EOS) == [(cut, EOS, None)]
    assert settle(scheduler, scheduler.schedule(), EOS) == [(cut, EOS, "length")]
    assert [seq.finish_reason for seq in (stopped, cut)] == ["stop", "length"]
    assert cut.is_finished and cut.completion_token_ids == [EOS, EOS]
    assert_nothing_left(scheduler)


def test_eos_in_the_prompt_does_not_stop() -> None:
    scheduler = make()
    scheduler.add(Sequence(0, [EOS, EOS], SamplingParams(), max_tokens=3, block_size=4))
    for _ in range(3):
        step(scheduler)
    assert_nothing_left(scheduler)


def waiting(scheduler: Scheduler) -> tuple[Sequence, Batch | None]:
    return add(scheduler, 20, 20)[1], None


def half_prefilled(scheduler: Scheduler) -> tuple[Sequence, Batch | None]:
    (seq,) = add(scheduler, 20)
    step(scheduler)
    assert seq.status is SequenceStatus.WAITING and seq.row >= 0
    return seq, None


def running(scheduler: Scheduler) -> tuple[Sequence, Batch | None]:
    (seq,) = add(scheduler, 5)
    step(scheduler)
    return seq, None


def preempted(scheduler: Scheduler) -> tuple[Sequence, Batch | None]:
    seq, _ = running(scheduler)
    scheduler.preempt(seq)
    return seq, None


def chunk_in_flight(scheduler: Scheduler) -> tuple[Sequence, Batch | None]:
    (seq,) = add(scheduler, 20)
    return seq, scheduler.schedule()


def prefill_in_flight(scheduler: Scheduler) -> tuple[Sequence, Batch | None]:
    (seq,) = add(scheduler, 5)
    return seq, scheduler.schedule()


def decode_in_flight(scheduler: Scheduler) -> tuple[Sequence, Batch | None]:
    seq, _ = running(scheduler)
    return seq, scheduler.schedule()


STATES = [waiting, half_prefilled, running, preempted, chunk_in_flight, prefill_in_flight, decode_in_flight]


@pytest.mark.parametrize("state", STATES)
def test_finish_in_every_state(state: Callable[[Scheduler], tuple[Sequence, Batch | None]]) -> None:
    """Pitfall 29: the sequence is gone at once; what a step in flight sampled for it is dropped."""
    scheduler = make(budget=8)
    seq, in_flight = state(scheduler)
    tokens = list(seq.token_ids)
    scheduler.finish(seq, "abort")
    scheduler.finish(seq, "length")  # the second one changes nothing
    scheduler.check_invariants()
    assert seq.is_finished and seq.finish_reason == "abort" and seq.row == -1 and seq.block_table == []
    if in_flight is not None:
        assert not scheduler.is_finished()
        assert settle(scheduler, in_flight) == []
    assert seq.token_ids == tokens
    for other in list(scheduler.waiting):
        scheduler.finish(other, "abort")
    assert_nothing_left(scheduler)


def test_nothing_that_was_in_flight_at_an_abort_is_shared() -> None:
    scheduler = make()
    (seq,) = add(scheduler, 9)
    batch = scheduler.schedule()
    scheduler.finish(seq, "abort")
    settle(scheduler, batch)
    assert scheduler.block_manager.hash_to_block_id == {}


def test_a_sequence_that_ends_with_a_step_in_flight_loses_that_steps_token() -> None:
    scheduler = make()
    stops, goes_on = add(scheduler, 3, 4)
    step(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.starts == [3, 4] and second.starts == [4, 5]
    assert scheduler.postprocess(first, [EOS, 8]) == [(stops, EOS, "stop"), (goes_on, 8, None)]
    scheduler.check_invariants()
    assert scheduler.postprocess(second, [1, 9]) == [(goes_on, 9, None)]
    assert stops.completion_token_ids == [7, EOS] and goes_on.completion_token_ids == [7, 8, 9]


def test_no_step_is_launched_past_the_length_limit() -> None:
    scheduler = make()
    (seq,) = add(scheduler, 3, max_tokens=2)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.schedule() is None and not scheduler.is_finished()
    settle(scheduler, first)
    assert settle(scheduler, second) == [(seq, 7, "length")]
    assert_nothing_left(scheduler)


# ---------------------------------------------------------------------- rollback


@pytest.mark.parametrize("state", [chunk_in_flight, prefill_in_flight, decode_in_flight])
def test_rollback_puts_everything_back(state: Callable[[Scheduler], tuple[Sequence, Batch | None]]) -> None:
    scheduler = make(budget=8)
    seq, batch = state(scheduler)
    tokens = list(seq.token_ids)
    scheduler.rollback(batch)
    scheduler.check_invariants()
    assert list(scheduler.waiting) == [seq] and not scheduler.running
    assert seq.token_ids == tokens and (seq.row, seq.num_computed_tokens, seq.num_scheduled_tokens) == (-1, 0, 0)
    assert scheduler.block_manager.num_free_blocks == 32
    while not step(scheduler).samples[-1]:
        pass
    assert seq.token_ids == [*tokens, 7]


def test_rollback_after_a_chunk_starts_from_what_is_cached() -> None:
    scheduler = make(budget=8)
    (seq,) = add(scheduler, 20)
    step(scheduler)
    scheduler.rollback(scheduler.schedule())
    batch = step(scheduler)
    assert (batch.starts, batch.counts) == ([8], [8]), "the first chunk was settled, so its blocks were registered"


def test_rollback_keeps_the_order_and_skips_what_has_ended() -> None:
    scheduler = make(budget=12)
    first, second, third, fourth = add(scheduler, 5, 5, 5, 5)
    batch = scheduler.schedule()
    assert batch.seqs == [first, second, third] and not batch.samples[2]
    scheduler.finish(second, "abort")
    scheduler.rollback(batch)
    scheduler.check_invariants()
    assert list(scheduler.waiting) == [first, third, fourth]


def test_rollback_of_two_steps_in_flight_keeps_the_order() -> None:
    """They share some sequences and not others, so undoing one after the other is not simply the reverse."""
    scheduler = make()
    first, second = add(scheduler, 5, 5)
    step(scheduler)
    (third,) = add(scheduler, 5)
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert [batch.seqs for batch in steps] == [[third], [first, second, third]]
    for batch in reversed(steps):
        scheduler.rollback(batch)
    scheduler.check_invariants()
    assert list(scheduler.waiting) == [first, second, third]


# ---------------------------------------------------------------------- preemption


def test_the_last_to_join_is_preempted_and_goes_to_the_head_with_its_tokens() -> None:
    scheduler = make(num_blocks=4)
    first, second = add(scheduler, 7, 7)
    step(scheduler)
    (third,) = add(scheduler, 2)
    step(scheduler)  # position 7 fits into the two blocks that each of them has, position 8 does not
    batch = step(scheduler)
    assert batch.seqs == [first] and scheduler.num_preemptions == 1
    assert list(scheduler.waiting) == [second, third]
    assert second.completion_token_ids == [7, 7] and (second.row, second.block_table) == (-1, [])
    assert second.num_scheduled_tokens == second.num_computed_tokens == 0
    assert first.completion_token_ids == [7, 7, 7]


def test_nothing_is_preempted_with_a_step_in_flight() -> None:
    scheduler = make(num_blocks=4)
    first, second = add(scheduler, 8, 8)
    prefill = scheduler.schedule()
    assert scheduler.schedule() is None and scheduler.num_preemptions == 0
    with pytest.raises(AssertionError):
        scheduler.preempt(second)
    settle(scheduler, prefill)
    assert step(scheduler).seqs == [first] and scheduler.num_preemptions == 1


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("length", [510, 511, 512])
def test_two_sequences_cross_a_boundary_in_a_full_pool(length: int, overlap: int) -> None:
    """Pitfall 28: two blocks each, all of the pool of four, and both need a third in the same step."""
    requests = [Request([i] * length, max_tokens=20) for i in range(2)]
    simulation = simulate(requests, num_blocks=4, overlap=overlap)
    assert simulation.stats["preemptions"] == 1


def test_preemption_at_exactly_257_tokens() -> None:
    """Pitfall 23: the 257th token is known and has no block yet when the sequence is preempted, and resumes from it."""
    requests = [Request([i] * 250, max_tokens=40) for i in range(2)]
    simulation = simulate(requests, num_blocks=2)
    assert simulation.stats["preemptions"] == 1
    (resumed,) = [batch for batch in simulation.batches[1:] if batch.is_prefill]
    assert resumed.starts[0] + resumed.counts[0] == 257
    assert len(simulation.committed[1]) == 40


@pytest.mark.parametrize(("prefix_caching", "overlap"), [(True, 0), (True, 1), (False, 1)])
def test_a_small_pool_gives_the_true_outputs(prefix_caching: bool, overlap: int) -> None:
    """Pitfall 22: 40 blocks, 64 prompts of 500 tokens that share 256, 300 new tokens each."""
    requests = [Request([0] * 256 + [i] * 244, max_tokens=300) for i in range(64)]
    simulation = simulate(requests, num_blocks=40, prefix_caching=prefix_caching, overlap=overlap)
    assert simulation.stats["preemptions"] > 0
    assert (simulation.stats["cached tokens"] > 0) is prefix_caching


# ---------------------------------------------------------------------- prefix cache


def test_identical_prompts_of_one_step_each_compute_their_own() -> None:
    """Pitfall 24: a block is shared only once its K/V exist."""
    requests = [Request([5] * 600, max_tokens=4) for _ in range(8)]
    simulation = simulate(requests, num_blocks=40)
    assert simulation.batches[0].counts == [600] * 8
    chunked = simulate(requests, num_blocks=40, max_num_batched_tokens=700)
    # The second starts 100 tokens in the first's step, and computes the rest itself. All later ones find it computed.
    starts = [start for batch in chunked.batches if batch.is_prefill for start in batch.starts]
    assert starts.count(0) == 2 and starts.count(512) == 6
    assert chunked.committed == simulation.committed


@pytest.mark.parametrize("length", [256, 512])
def test_a_prompt_of_whole_blocks_twice(length: int) -> None:
    """Pitfall 20: the last token is computed again, so its block cannot be shared."""
    twice = [Request([3] * length, max_tokens=5), Request([3] * length, max_tokens=5, arrival=1)]
    simulation = simulate(twice, num_blocks=8)
    assert simulation.stats["cached tokens"] == length - 256
    assert simulation.committed[0] == simulation.committed[1]


def test_recycled_blocks_are_not_found_again() -> None:
    """Pitfall 25: A, then junk through every block of the pool, then A again."""
    a = [4] * 600
    requests = [
        Request(a, max_tokens=3),
        Request([5] * 1000, max_tokens=3, arrival=10),
        Request(a, max_tokens=3, arrival=20),
    ]
    simulation = simulate(requests, num_blocks=4)
    assert simulation.stats["cached tokens"] == 0
    roomy = simulate(requests, num_blocks=8)  # here A's blocks survive the junk (pitfall 26)
    assert roomy.stats["cached tokens"] == 512
    assert roomy.committed == simulation.committed


@pytest.mark.parametrize("budget", [256, 300, 512, 1000])
@pytest.mark.parametrize("overlap", [0, 1])
def test_chunks_change_nothing(budget: int, overlap: int) -> None:
    """Pitfall 30: a prompt of 1,300 tokens under several budgets."""
    simulation = simulate(
        [Request([6] * 1300, max_tokens=20)], num_blocks=6, max_num_batched_tokens=budget, overlap=overlap
    )
    counts = [batch.num_tokens for batch in simulation.batches if batch.is_prefill]
    assert counts == [budget] * (1300 // budget) + [1300 % budget]
    assert simulation.stats["chunks"] == 1300 // budget


def test_a_reset_under_a_running_sequence_lasts() -> None:
    """What it has computed is forgotten, and what it fills from now on is not found either: its prefix is unknown."""
    scheduler = make()
    (seq,) = add(scheduler, 9)
    step(scheduler)
    scheduler.block_manager.reset_prefix_cache()
    for _ in range(8):
        step(scheduler)
    assert scheduler.block_manager.hash_to_block_id == {}
    scheduler.finish(seq, "abort")
    assert_nothing_left(scheduler)


@pytest.mark.parametrize("overlap", [0, 1])
def test_colliding_hashes_change_nothing(overlap: int) -> None:
    """Pitfall 32, with preemption and sharing on top."""
    requests = [Request([*range(i % 2, 20), *[i] * 20], max_tokens=30, arrival=3 * i) for i in range(8)]
    simulation = simulate(requests, num_blocks=20, block_size=8, weak_hash=True, overlap=overlap)
    assert simulation.stats["cached tokens"] > 0 and simulation.stats["preemptions"] > 0
