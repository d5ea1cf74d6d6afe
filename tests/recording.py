"""Engines under observation: what was queued, scheduled and shared, with the books checked after every step.

Engine tests build their LLMs with `engine(...)`, so that each of them also shows that nothing leaks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import Batch, Output
from nanovllm.engine.sequence import Sequence

# A gap between the best two logits that another batch, chunk or cache cannot turn round: float32 moves by about 1e-5.
CLEAR = 1e-4


@dataclass
class Step:
    """One scheduled step; `running` counts the sequences that hold blocks after it was scheduled."""

    is_prefill: bool
    seq_ids: list[int]
    starts: list[int]
    counts: list[int]
    running: int


@dataclass
class Recording:
    """Everything that one engine did since it was built, or since `clear`."""

    seqs: list[Sequence] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    # (sequence, cached tokens, block table) of each admission; a preempted sequence is admitted again.
    admissions: list[tuple[Sequence, int, list[int]]] = field(default_factory=list)
    preempted_lengths: list[int] = field(default_factory=list)
    # Of each step, between the best two logits of any of its rows.
    gaps: list[float] = field(default_factory=list)

    def clear(self) -> None:
        for entries in (self.seqs, self.steps, self.admissions, self.preempted_lengths, self.gaps):
            entries.clear()

    @property
    def first_hits(self) -> list[int]:
        """Tokens that each sequence found in the prefix cache when it was first admitted, in order of queueing."""
        hits: dict[int, int] = {}
        for seq, num_cached, _ in self.admissions:
            hits.setdefault(seq.seq_id, num_cached)
        return [hits[seq.seq_id] for seq in self.seqs]

    @property
    def most_chunks(self) -> int:
        """Prefill steps of the sequence that took most of them for one admission."""
        chunks: dict[int, int] = {}
        most = 0
        for step in self.steps:
            for seq_id, count in zip(step.seq_ids, step.counts, strict=True):
                chunks[seq_id] = chunks.get(seq_id, 0) + 1 if step.is_prefill and count else 0
                most = max(most, chunks[seq_id])
        return most

    @property
    def most_tokens(self) -> int:
        return max(sum(step.counts) for step in self.steps)

    @property
    def most_running(self) -> int:
        return max(step.running for step in self.steps)

    @property
    def most_rows(self) -> int:
        return max(len(step.seq_ids) for step in self.steps)


def observe(llm: LLM) -> Recording:
    """Wrap the scheduler of `llm`; its invariants are checked whenever it has decided or committed something."""
    log, scheduler, blocks = Recording(), llm.scheduler, llm.scheduler.block_manager
    add, schedule, postprocess, preempt = scheduler.add, scheduler.schedule, scheduler.postprocess, scheduler.preempt
    allocate, sampler = blocks.allocate, llm.model_runner.sampler

    def recorded_add(seq: Sequence) -> None:
        log.seqs.append(seq)
        add(seq)

    def recorded_schedule() -> Batch | None:
        batch = schedule()
        scheduler.check_invariants()
        if batch is not None:
            running = len(scheduler.running) + sum(seq.row >= 0 for seq in scheduler.waiting)
            seq_ids = [seq.seq_id for seq in batch.seqs]
            log.steps.append(Step(batch.is_prefill, seq_ids, list(batch.starts), list(batch.counts), running))
        return batch

    def recorded_postprocess(batch: Batch, *results: object) -> list[Output]:
        outputs = postprocess(batch, *results)
        scheduler.check_invariants()
        return outputs

    def recorded_preempt(seq: Sequence) -> None:
        log.preempted_lengths.append(len(seq))
        preempt(seq)

    def recorded_allocate(seq: Sequence) -> None:
        allocate(seq)
        log.admissions.append((seq, seq.num_cached_tokens, list(seq.block_table)))

    def recorded_sampler(logits: torch.Tensor, *args: object) -> torch.Tensor:
        if len(logits):
            best = logits.topk(2).values
            log.gaps.append((best[:, 0] - best[:, 1]).min().item())
        return sampler(logits, *args)

    llm.model_runner.sampler = recorded_sampler
    scheduler.add, scheduler.schedule, scheduler.postprocess = recorded_add, recorded_schedule, recorded_postprocess
    scheduler.preempt, blocks.allocate = recorded_preempt, recorded_allocate
    return log


def assert_idle(llm: LLM) -> None:
    """Nothing is queued or running, and every block and row has come back."""
    scheduler, blocks = llm.scheduler, llm.scheduler.block_manager
    assert llm.is_finished() and not scheduler.waiting and not scheduler.running and scheduler.num_in_flight == 0
    assert blocks.num_free_blocks == len(blocks.blocks) and not blocks.used_block_ids
    scheduler.check_invariants()


@contextmanager
def engine(path: str, **kwargs: object) -> Iterator[tuple[LLM, Recording]]:
    """An observed LLM on the CPU, without a tokenizer unless asked for; idle again when the test is through with it.

    The pool holds 16,384 tokens unless told otherwise: checking the books takes time in proportion to it.
    """
    num_blocks = 16384 // kwargs.get("kvcache_block_size", 256)
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "num_kvcache_blocks": num_blocks}
    llm = LLM(path, **(defaults | kwargs))
    try:
        yield llm, observe(llm)
        assert_idle(llm)
    finally:
        llm.exit()


def greedy(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy completions of all prompts, in one call; no EOS ends them."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def answers(outputs: list[dict[str, object]]) -> list[tuple[object, ...]]:
    """What `generate` answered, without what depends on the cache and on how the prompt was given."""
    return [(output["text"], output["token_ids"], output["finish_reason"]) for output in outputs]
