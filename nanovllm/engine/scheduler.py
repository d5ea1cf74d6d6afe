"""Decides what the next step computes, and commits what a step has computed.

`LLMEngine` calls `schedule()` to get a `Batch`, hands it to the `ModelRunner`, and gives the sampled ids back to
`postprocess()`. Plain Python, no torch. Everything here works with one step in flight: `schedule()` may be called again
before the previous batch's `postprocess()`, and then decides on `num_scheduled_tokens`, which it advances itself,
never on tokens it has not seen.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Logprobs, RowExtras, Sequence, SequenceStatus


@dataclass(slots=True)
class Batch:
    """One step, as plain data: a rank needs nothing else, since its tables know the rest by row.

    Line i of `rows`, `starts`, `counts`, `samples` is one sequence: compute `counts[i]` tokens from position
    `starts[i]` on, and sample a token behind them if `samples[i]`.
    """

    is_prefill: bool
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)  # prefill only; decode reads the runner's last_tokens
    new_rows: list[tuple[int, float, int]] = field(default_factory=list)  # (row, temperature, seed)
    new_blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)  # (row, index of the first, block ids)
    new_extras: list[RowExtras] = field(default_factory=list)  # of those new rows that have any
    # (line, how many alternatives, the tokens behind the line's first ones) where prompt log probabilities are wanted.
    prompt_targets: list[tuple[int, int, list[int]]] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)  # the host's own; not pickled

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def add(self, seq: Sequence, count: int, samples: bool) -> None:
        self.seqs.append(seq)
        self.rows.append(seq.row)
        self.starts.append(seq.num_scheduled_tokens)
        self.counts.append(count)
        self.samples.append(samples)

    def __getstate__(self) -> tuple[object, ...]:
        """For the other ranks, every step: what a decode step does not say by itself, and nothing of the host's own."""
        state = (self.is_prefill, self.rows, self.starts, self.new_rows, self.new_blocks, self.new_extras)
        return (*state, self.counts, self.samples, self.token_ids, self.prompt_targets) if self.is_prefill else state

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        is_prefill, rows, starts, new_rows, new_blocks, new_extras, *rest = state
        counts, samples, token_ids, targets = rest or ([1] * len(rows), [True] * len(rows), [], [])
        new = new_rows, new_blocks, new_extras
        self.__init__(is_prefill, rows, starts, counts, samples, token_ids, *new, targets)  # type: ignore[misc]


@dataclass(slots=True)
class StepLogprobs:
    """Log probabilities of a step, by line of its batch, for the lines that asked for them."""

    sampled: dict[int, Logprobs] = field(default_factory=dict)
    prompt: dict[int, list[Logprobs]] = field(default_factory=dict)  # of the tokens behind the line's first ones


Output = tuple[Sequence, int, str | None]
"""A committed token: (sequence, token id, finish reason or None)."""


class Scheduler:
    """Prefill first, then decode everything that runs; preempt from the tail when blocks run out."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        # A decode step takes one token a sequence, so the token budget bounds the running sequences as well.
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens)
        self.free_rows = list(range(self.max_num_running - 1, -1, -1))
        self.num_in_flight = 0
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        return not self.waiting and not self.running and self.num_in_flight == 0

    # ------------------------------------------------------------------ launch side

    def schedule(self) -> Batch | None:
        """The next step, or None: nothing to do, or nothing that can start before the step in flight is settled."""
        batch = self._schedule_prefill() or self._schedule_decode()
        if batch is not None:
            self.num_in_flight += 1
        return batch

    def _schedule_prefill(self) -> Batch | None:
        batch = Batch(is_prefill=True)
        budget = self.max_num_batched_tokens
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            if seq.row < 0 and not self._admit(seq, batch):
                break
            start = seq.num_scheduled_tokens
            count = min(seq.num_tokens - start, budget)
            is_last_chunk = start + count == seq.num_tokens
            batch.add(seq, count, samples=is_last_chunk)
            batch.token_ids.append(seq.token_ids[start : start + count])
            if seq.wants_prompt_logprobs:
                targets = seq.token_ids[start + 1 : min(start + count + 1, seq.num_prompt_tokens)]
                if targets:  # a chunk of one token may be the prompt's last, with nothing of it to come
                    batch.prompt_targets.append((len(batch.rows) - 1, seq.num_prompt_logprobs, targets))
            seq.num_scheduled_tokens += count
            budget -= count
            # A half-prefilled sequence stays at the head, with its row and its blocks, and goes on next step.
            if is_last_chunk:
                self.running.append(self.waiting.popleft())
                seq.status = SequenceStatus.RUNNING
        return batch if batch.rows else None

    def _admit(self, seq: Sequence, batch: Batch) -> bool:
        """Give the sequence a row and all blocks for its known tokens, or nothing."""
        if not self.free_rows or not self.block_manager.can_allocate(seq):
            return False
        self.block_manager.allocate(seq)
        seq.row = self.free_rows.pop()
        batch.new_rows.append((seq.row, seq.temperature, seq.seed))
        batch.new_blocks.append((seq.row, 0, list(seq.block_table)))
        extras = seq.extras(self.eos_token_ids)
        if extras is not None:
            batch.new_extras.append(extras)
        if seq.wants_prompt_logprobs:  # what an admission that was undone has left behind comes again
            seq.prompt_logprobs = [None]
        return True

    def _schedule_decode(self) -> Batch | None:
        blocks = self.block_manager
        while True:
            seqs = [seq for seq in self.running if not seq.is_last_token_scheduled]
            needy = [seq for seq in seqs if blocks.needs_block(seq)]
            if len(needy) <= blocks.num_free_blocks:
                break
            if self.num_in_flight:
                # The tokens of a preempted sequence must all be known, or it could not be computed again.
                return None
            self.preempt(self.running[-1])
        if not seqs:
            return None
        batch = Batch(is_prefill=False)
        for seq in needy:
            batch.new_blocks.append((seq.row, len(seq.block_table), [blocks.append_block(seq)]))
        for seq in seqs:
            batch.add(seq, 1, samples=True)
            seq.num_scheduled_tokens += 1
        return batch

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks and put it first in line; its tokens stay, its K/V is computed again."""
        assert self.num_in_flight == 0, "a sequence is preempted only when all its tokens are known"
        self._requeue(seq)
        self.num_preemptions += 1

    def _requeue(self, seq: Sequence) -> None:
        self._queue_of(seq).remove(seq)
        self._take_back(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_scheduled_tokens = seq.num_computed_tokens = 0
        self.waiting.appendleft(seq)

    # ------------------------------------------------------------------ settle side

    def postprocess(self, batch: Batch, token_ids: list[int], logprobs: StepLogprobs | None = None) -> list[Output]:
        """Commit a step: `token_ids` holds one id for each line of the batch that samples, in order."""
        outputs: list[Output] = []
        sampled = iter(token_ids)
        for line, (seq, start, count, samples) in enumerate(
            zip(batch.seqs, batch.starts, batch.counts, batch.samples, strict=True)
        ):
            token_id = next(sampled) if samples else None
            if seq.is_finished:  # it ended while this step was in flight: the token is one too many
                continue
            seq.num_computed_tokens = start + count
            if seq.num_computed_tokens // seq.block_size > start // seq.block_size:  # a block has become full
                self.block_manager.register_blocks(seq, start)
            if logprobs is not None:
                seq.prompt_logprobs += logprobs.prompt.get(line, ())
                if line in logprobs.sampled:
                    seq.logprobs.append(logprobs.sampled[line])
            if token_id is None:
                continue
            seq.append_token(token_id)
            reason, stop_reason = self._finish_reason(seq)
            if reason is not None:
                self.finish(seq, reason, stop_reason)
            outputs.append((seq, token_id, reason))
        self.num_in_flight -= 1  # last: a step that fails in here is still in flight, and is rolled back
        return outputs

    def rollback(self, batch: Batch) -> None:
        """Undo a step that failed or was interrupted: its sequences wait again, in order, with all their tokens.

        With several steps in flight all are undone, the newest first: a step rests on those before it. (Older ones may
        be settled first instead.)
        """
        self.num_in_flight -= 1
        for seq in reversed(batch.seqs):
            if not seq.is_finished:
                self._requeue(seq)
        # Two steps in flight share some sequences and not others; putting back one after the other mixes them up.
        self.waiting = deque(sorted(self.waiting, key=lambda seq: seq.seq_id))

    def _finish_reason(self, seq: Sequence) -> tuple[str | None, int | None]:
        """(finish reason, stop reason) of a sequence that has just been given a token; EOS is no stop reason."""
        if not seq.ignore_eos and seq.last_token in self.eos_token_ids:
            return "stop", None
        if seq.last_token in seq.stop_token_ids:
            return "stop", seq.last_token
        return ("length" if seq.num_tokens >= seq.num_prompt_tokens + seq.max_tokens else None), None

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence wherever it is; the only way out, legal with a step in flight.

        A step in flight may still write K/V into the blocks given back here. They are not registered, and whoever
        gets them next writes them in a later launch on the same stream, so nobody reads the stale write.
        """
        if seq.is_finished:
            return
        self._queue_of(seq).remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self._take_back(seq)

    def _queue_of(self, seq: Sequence) -> deque[Sequence]:
        return self.running if seq.status is SequenceStatus.RUNNING else self.waiting

    def _take_back(self, seq: Sequence) -> None:
        self.block_manager.release(seq)
        if seq.row >= 0:
            self.free_rows.append(seq.row)
            seq.row = -1

    def check_invariants(self) -> None:
        """Assert that queues, rows and blocks agree. For tests."""
        holders = list(self.running) + [seq for seq in self.waiting if seq.row >= 0]
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.running)
        assert all(seq.status is SequenceStatus.WAITING for seq in self.waiting)
        assert all(seq.row < 0 and not seq.block_table for seq in list(self.waiting)[1:]), (
            "only the head may hold blocks"
        )
        rows = [seq.row for seq in holders]
        assert sorted(rows + self.free_rows) == list(range(self.max_num_running)), "rows were lost or doubled"
        for seq in holders:
            assert seq.num_computed_tokens <= seq.num_scheduled_tokens <= seq.num_tokens + self.num_in_flight, seq
            assert len(seq.block_table) == -(-max(seq.num_tokens, seq.num_scheduled_tokens) // seq.block_size) or (
                # a sequence that has just been given the first token of a block gets the block when it is scheduled
                seq.num_tokens % seq.block_size == 1 and len(seq.block_table) == seq.num_blocks - 1
            ), seq
        self.block_manager.check_invariants(holders)
