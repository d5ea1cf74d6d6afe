"""Random workloads over the simulated device: nothing may go wrong in them, and each of five seeded bugs must."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Batch, Scheduler
from nanovllm.engine.sequence import Sequence
from tests.engine.scheduler_harness import VOCAB_SIZE, Case, Request, Simulation

# Prompts are cut from these, so that many begin alike. The two differ in their first token alone: all later blocks are
# equal, and only the prefixes before them are not.
COMMON = random.Random(0).choices(range(VOCAB_SIZE), k=64)
FAMILIES = [[0, *COMMON], [1, *COMMON]]
EVENTS = ["abort", "abort in flight", "fail", "settle, then fail", "interrupt", "reset"]


@st.composite
def requests(draw: st.DrawFn, block_size: int) -> Request:
    """A prompt whose length is near a block boundary as often as not, and whose last tokens may be its own."""
    offset = draw(st.sampled_from([0, 0, 1, -1, block_size // 2]))
    length = max(draw(st.sampled_from([0, 1, 2, 2, 3])) * block_size + offset, 1)
    prompt = draw(st.sampled_from(FAMILIES))[:length]
    own = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=min(3, length)))
    prompt[length - len(own) :] = own
    return Request(
        prompt,
        max_tokens=draw(st.integers(1, 2 * block_size + 1)),
        ignore_eos=draw(st.booleans()),
        arrival=draw(st.just(0) | st.integers(0, 24)),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([4, 8, 16]))
    drawn = draw(st.lists(requests(block_size), min_size=2, max_size=6))
    indices = st.integers(0, len(drawn) - 1)
    # The last token of a sequence is never computed, so it needs no slot.
    smallest_pool = max(-(-(len(request.tokens) - 1) // block_size) for request in drawn)
    return Case(
        drawn,
        num_blocks=smallest_pool + draw(st.sampled_from([0, 0, 1, 2, 4, 8])),
        block_size=block_size,
        max_num_seqs=draw(st.sampled_from([8, 1, 2, 3])),
        max_num_batched_tokens=draw(st.sampled_from([1000, 1000, 3 * block_size, block_size + 3, block_size, 2])),
        eos_token_ids=draw(st.sampled_from([frozenset(), frozenset({2}), frozenset({3, 5})])),
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
        weak_hash=draw(st.booleans()),
        overlap=draw(st.integers(0, 1)),
        events=draw(st.lists(st.tuples(st.integers(0, 24), st.sampled_from(EVENTS), indices), max_size=4)),
    )


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_any_workload_gives_the_true_outputs_and_leaves_nothing_behind(case: Case) -> None:
    assert Simulation(case).run().scheduler.is_finished()


# ---------------------------------------------------------------------- does the search find anything?


def search(check_books: bool = True) -> Counter[str]:
    """300 cases, the same ones each time; AssertionError from the first that fails, else what they met, in numbers."""
    met: Counter[str] = Counter()

    @settings(
        max_examples=300,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
        report_multiple_bugs=False,
    )
    @given(case=cases())
    def run(case: Case) -> None:
        met.update({name: bool(number) for name, number in Simulation(case, check_books).run().stats.items()})

    run()
    return met


@pytest.mark.slow
def test_the_search_meets_everything_that_can_happen() -> None:
    met = search()
    for name in (
        "preemptions",
        "chunks",
        "cached tokens",
        "most shared blocks",
        "overlapped steps",
        "dropped tokens",
        "aborts",
        "rollbacks",
    ):
        assert met[name] >= 15, f"only {met[name]} of the cases met {name}: {met}"


def break_257_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is taken for the second position of a block instead of the first."""

    def needs_block(self: BlockManager, seq: Sequence) -> bool:
        return seq.num_scheduled_tokens % self.block_size == 1

    monkeypatch.setattr(BlockManager, "needs_block", needs_block)


def lose_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing a block that is in use does not count."""
    share = BlockManager._share

    def share_without_counting(self: BlockManager, block_id: int) -> None:
        share(self, block_id)
        self.blocks[block_id].ref_count = 1

    monkeypatch.setattr(BlockManager, "_share", share_without_counting)


def keep_a_stale_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block handed out for new content is still found under the old one."""

    def take_free(self: BlockManager) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        self.blocks[block_id].ref_count = 1
        self.used_block_ids.add(block_id)
        return block_id

    monkeypatch.setattr(BlockManager, "_take_free", take_free)


def share_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's blocks are registered when they are allocated, before anything has computed them."""
    allocate = BlockManager.allocate

    def allocate_and_register(self: BlockManager, seq: Sequence) -> None:
        allocate(self, seq)
        num_cached, seq.num_computed_tokens = seq.num_computed_tokens, seq.num_tokens
        self.register_blocks(seq, num_cached)
        seq.num_computed_tokens = num_cached

    monkeypatch.setattr(BlockManager, "allocate", allocate_and_register)


def exceed_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill step may take one token too many."""
    schedule_prefill = Scheduler._schedule_prefill

    def schedule_one_more(self: Scheduler) -> Batch | None:
        self.max_num_batched_tokens += 1
        try:
            return schedule_prefill(self)
        finally:
            self.max_num_batched_tokens -= 1

    monkeypatch.setattr(Scheduler, "_schedule_prefill", schedule_one_more)


@pytest.mark.parametrize("check_books", [True, False], ids=["books", "device only"])
@pytest.mark.parametrize(
    "seed_bug", [break_257_rule, lose_a_reference, keep_a_stale_hash, share_early, exceed_the_budget]
)
def test_a_seeded_bug_is_caught(
    monkeypatch: pytest.MonkeyPatch, seed_bug: Callable[[pytest.MonkeyPatch], None], check_books: bool
) -> None:
    """Whether or not the scheduler's invariants are checked after every step. Unpatched, the same search passes."""
    seed_bug(monkeypatch)
    with pytest.raises(AssertionError):
        search(check_books)
