"""A whole engine without a model: the real Scheduler and BlockManager over a simulated device, checked at every step.

The simulated K/V of a position is one number that names the whole prefix it was computed from, and a sampled token is
a function of that number alone. So a wrong block table, a block shared too early, a stale hash or a lost reference
shows as a read of the wrong number, and every output must equal `Request.expected`, which no pool, budget, preemption
or overlap can change. `test_scheduler.py` runs chosen cases, `test_scheduler_properties.py` random ones.
"""

import contextlib
import pickle
from collections import Counter, defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Batch, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

VOCAB_SIZE = 7
EMPTY = 0  # K/V of a slot never written, and what stands before position 0


def next_kv(previous: int, token_id: int) -> int:
    """The K/V of a token behind the prefix named by `previous`."""
    return hash((previous, token_id))


def sample(kv: int) -> int:
    return (kv >> 8) % VOCAB_SIZE


@dataclass
class Request:
    """One request, and the truth about it: what a model that sees nothing else would compute."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool = False
    arrival: int = 0  # the first step that may compute it
    tokens: list[int] = field(init=False, repr=False)  # prompt and all that would follow, were there no EOS
    kv: list[int] = field(init=False, repr=False)  # of all of these but the last, which is never computed

    def __post_init__(self) -> None:
        self.tokens, self.kv = list(self.prompt), []
        kv = EMPTY
        for position in range(len(self.prompt) + self.max_tokens - 1):
            kv = next_kv(kv, self.tokens[position])
            self.kv.append(kv)
            if position + 1 == len(self.tokens):
                self.tokens.append(sample(kv))

    def expected(self, eos_token_ids: Collection[int]) -> tuple[list[int], str]:
        """The completion and its finish reason."""
        completion = self.tokens[len(self.prompt) :]
        if not self.ignore_eos:
            for i, token_id in enumerate(completion):
                if token_id in eos_token_ids:
                    return completion[: i + 1], "stop"
        return completion, "length"


class LaunchError(Exception):
    """The simulated device failed in the middle of a step."""


class SimulatedRunner:
    """The device: row tables and a paged cache, fed only by pickled batches, as a rank in another process would be.

    Launches run in order, as on a stream; so a step runs at its launch, however late its ids are looked at.
    """

    def __init__(self, requests: list[Request], num_blocks: int, block_size: int) -> None:
        self.all_requests = requests
        self.block_size = block_size
        self.cache = [[EMPTY] * block_size for _ in range(num_blocks)]
        self.block_tables: dict[int, list[int]] = {}
        self.requests: dict[int, Request] = {}  # by row; a request's seed tells which it is
        self.last_tokens: dict[int, int] = {}

    def launch(self, data: bytes, fail_after: int | None = None) -> list[int]:
        """Run a step and return its sampled ids; LaunchError once `fail_after` of its lines have been computed."""
        batch: Batch = pickle.loads(data)
        for row, _, seed in batch.new_rows:
            self.requests[row] = self.all_requests[seed]
            self.block_tables[row] = []
        for row, first, block_ids in batch.new_blocks:
            assert first == len(self.block_tables[row]), f"row {row} gets block {first} out of turn"
            self.block_tables[row] += block_ids
        # What earlier steps have left is read before anything is written: K/V of this very step do not count as cached.
        for row, start in zip(batch.rows, batch.starts, strict=True):
            self.check_reads(row, start)
        token_ids = batch.token_ids if batch.is_prefill else [[self.last_tokens[row]] for row in batch.rows]
        sampled = []
        for i, (row, start, count) in enumerate(zip(batch.rows, batch.starts, batch.counts, strict=True)):
            if i == fail_after:
                raise LaunchError
            assert len(token_ids[i]) == count > 0
            kv = self.write(row, start, token_ids[i])
            if batch.samples[i]:
                self.last_tokens[row] = sample(kv)
                sampled.append(sample(kv))
        # Once more, now with this step's own: no two of its lines may have written the same slot.
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            self.check_reads(row, start + count)
        return sampled

    def write(self, row: int, start: int, token_ids: list[int]) -> int:
        """Compute K/V from what the cache holds, right or wrong; returns the last."""
        table, size = self.block_tables[row], self.block_size
        kv = self.cache[table[(start - 1) // size]][(start - 1) % size] if start else EMPTY
        for position, token_id in enumerate(token_ids, start):
            assert position // size < len(table), f"row {row} has no block for position {position}"
            kv = next_kv(kv, token_id)
            self.cache[table[position // size]][position % size] = kv
        return kv

    def check_reads(self, row: int, length: int) -> None:
        """Assert that the first `length` positions of a row, read through its block table, hold the true K/V."""
        expected, table = self.requests[row].kv, self.block_tables[row]
        assert length <= len(table) * self.block_size, f"row {row} has no block for position {length - 1}"
        for i, first in enumerate(range(0, length, self.block_size)):
            last = min(first + self.block_size, length)
            wrong = self.cache[table[i]][: last - first] != expected[first:last]
            assert not wrong, f"row {row} reads wrong K/V at positions {first} to {last - 1}, in block {table[i]}"


class WeakHashBlockManager(BlockManager):
    """Its hash is blind to the prefix and collides all the time; only comparing contents and parents can help."""

    @staticmethod
    def compute_hash(token_ids: list[int], prefix: int | None = None) -> int:
        return BlockManager.compute_hash(token_ids) % 16


@dataclass
class Case:
    """What a simulation needs to know. Events are (step, what, argument), see `Simulation.step`."""

    requests: list[Request]
    num_blocks: int
    block_size: int = 256
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    eos_token_ids: frozenset[int] = frozenset()
    prefix_caching: bool = True
    weak_hash: bool = False
    overlap: int = 0  # steps that stay in flight while the next one is scheduled
    events: list[tuple[int, str, int]] = field(default_factory=list)

    @property
    def max_steps(self) -> int:
        """Far more steps than are needed: every admission and every decode step yields a token at least."""
        longest = max(len(request.tokens) for request in self.requests)
        admission = 2 + longest // self.max_num_batched_tokens
        tokens = sum(request.max_tokens for request in self.requests) + len(self.events) * len(self.requests)
        return max(request.arrival for request in self.requests) + 2 * admission * tokens + len(self.events) + 2


class Simulation:
    """Runs a case to its end; AssertionError as soon as anything is wrong.

    `check_books=False` leaves out the scheduler's own invariants, so that only what a user could see counts.
    """

    def __init__(self, case: Case, check_books: bool = True) -> None:
        self.case = case
        self.check_books = check_books
        manager = WeakHashBlockManager if case.weak_hash else BlockManager
        self.blocks = manager(case.num_blocks, case.block_size, case.prefix_caching)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            eos_token_ids=case.eos_token_ids,
        )
        self.runner = SimulatedRunner(case.requests, case.num_blocks, case.block_size)
        self.seqs: dict[int, Sequence] = {}  # by index of the request
        self.committed: dict[int, list[int]] = defaultdict(list)
        self.in_flight: deque[tuple[Batch, list[int]]] = deque()
        self.batches: list[Batch] = []
        self.stats: Counter[str] = Counter()

    def run(self) -> "Simulation":
        number = 0
        while len(self.seqs) < len(self.case.requests) or not self.scheduler.is_finished():
            assert number < self.case.max_steps, "the sequences do not finish"
            self.step(number)
            number += 1
        self.check_end()
        return self

    # ------------------------------------------------------------------ one step

    def step(self, number: int) -> None:
        events = {what: argument for step, what, argument in self.case.events if step == number}
        for i, request in enumerate(self.case.requests):
            if i not in self.seqs and request.arrival <= number:
                self.add(i, request)
        if "reset" in events:
            self.blocks.reset_prefix_cache()
        self.abort(events.get("abort"))
        batch = self.scheduler.schedule()
        if batch is None:
            assert self.in_flight or self.scheduler.is_finished(), "there is work, and none of it can start"
            self.settle_all()
        elif "fail" in events:
            self.fail(batch)
            self.roll_back_all()
        elif "settle, then fail" in events:
            self.settle_all()
            self.fail(batch)
        else:
            self.launch(batch)
            self.abort(events.get("abort in flight"))
            if "interrupt" in events:
                self.roll_back_all()
        while len(self.in_flight) > self.case.overlap:
            self.settle()
        self.check()

    def add(self, index: int, request: Request) -> None:
        params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
        self.seqs[index] = Sequence(
            len(self.seqs),
            request.prompt,
            params,
            max_tokens=request.max_tokens,
            block_size=self.case.block_size,
            seed=index,
        )
        self.scheduler.add(self.seqs[index])

    def launch(self, batch: Batch, fail_after: int | None = None) -> None:
        self.check_batch(batch)
        self.batches.append(batch)
        self.in_flight.append((batch, self.runner.launch(pickle.dumps(batch), fail_after)))

    def settle(self) -> None:
        batch, token_ids = self.in_flight.popleft()
        outputs = self.scheduler.postprocess(batch, token_ids)
        for seq, token_id, reason in outputs:
            assert reason == seq.finish_reason
            self.committed[seq.seed].append(token_id)
        self.stats["dropped tokens"] += len(token_ids) - len(outputs)

    def settle_all(self) -> None:
        while self.in_flight:
            self.settle()

    def abort(self, index: int | None) -> None:
        if index is None or index not in self.seqs or self.seqs[index].is_finished:
            return
        self.scheduler.finish(self.seqs[index], "abort")
        self.stats["aborts"] += 1

    def fail(self, batch: Batch) -> None:
        """The launch of a batch fails halfway, after it has written some K/V."""
        with contextlib.suppress(LaunchError):
            self.launch(batch, fail_after=len(batch.rows) // 2)
        self.scheduler.rollback(batch)
        self.stats["rollbacks"] += 1

    def roll_back_all(self) -> None:
        """Forget all steps in flight, the newest first; the device computes them nevertheless, as after Ctrl-C."""
        while self.in_flight:
            self.scheduler.rollback(self.in_flight.pop()[0])
            self.stats["rollbacks"] += 1

    # ------------------------------------------------------------------ checks

    def check_batch(self, batch: Batch) -> None:
        case = self.case
        assert batch.num_tokens <= case.max_num_batched_tokens, f"{batch.num_tokens} tokens are over the budget"
        assert len(set(batch.rows)) == len(batch.rows) <= case.max_num_seqs, "rows are doubled, or too many"
        new_rows = {row for row, _, _ in batch.new_rows}
        for row, start, samples in zip(batch.rows, batch.starts, batch.samples, strict=True):
            self.stats["chunks"] += batch.is_prefill and not samples
            self.stats["cached tokens"] += start if row in new_rows else 0
        shared = sum(block.ref_count > 1 for block in self.blocks.blocks)
        self.stats["most shared blocks"] = max(self.stats["most shared blocks"], shared)
        self.stats["overlapped steps"] += bool(self.in_flight)

    def check(self) -> None:
        scheduler = self.scheduler
        if self.check_books:
            scheduler.check_invariants()
        num_running = scheduler.max_num_running - len(scheduler.free_rows)
        assert num_running <= min(self.case.max_num_seqs, self.case.max_num_batched_tokens), "too many sequences run"
        order = [seq.seq_id for seq in (*scheduler.running, *scheduler.waiting)]
        assert order == sorted(order), f"sequences overtake each other: {order}"

    def check_end(self) -> None:
        """Outputs are the true ones and everything has been given back."""
        for i, request in enumerate(self.case.requests):
            seq = self.seqs[i]
            expected, reason = request.expected(self.case.eos_token_ids)
            assert seq.prompt_token_ids == request.prompt
            assert seq.completion_token_ids == self.committed[i], f"{seq}: tokens and outputs differ"
            assert seq.finish_reason in (reason, "abort"), f"{seq}: {seq.finish_reason} instead of {reason}"
            if seq.finish_reason == "abort":
                expected = expected[: seq.num_completion_tokens]
            assert seq.completion_token_ids == expected, f"{seq}: wrong tokens"
            assert not seq.block_table and seq.row == -1, f"{seq} has ended and keeps its row or its blocks"
        assert self.scheduler.schedule() is None and not self.in_flight
        assert self.blocks.num_free_blocks == self.case.num_blocks and not self.blocks.used_block_ids, "blocks leaked"
        assert len(self.scheduler.free_rows) == self.scheduler.max_num_running, "rows leaked"
        self.stats["preemptions"] = self.scheduler.num_preemptions


def simulate(requests: list[Request], **settings: object) -> Simulation:
    """Run requests to their end; keywords are those of `Case`."""
    return Simulation(Case(requests, **settings)).run()
