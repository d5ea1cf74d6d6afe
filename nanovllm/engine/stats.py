"""Counters of one engine, for `llm.stats()` and for the warning about a cache that is too small.

`LLMEngine` counts once a step, at settling, so that nothing here costs time per token.
"""

import logging
from dataclasses import dataclass

from nanovllm.engine.scheduler import Scheduler

logger = logging.getLogger("nanovllm")

_MIN_PREEMPTIONS = 16  # fewer since the last warning are not worth one


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where an engine stands now, and what it has done since it was built. Times are in seconds."""

    # Now.
    num_running: int  # sequences that hold blocks
    num_waiting: int
    num_kvcache_blocks: int
    num_used_blocks: int
    kv_occupancy: float  # share of the pool's blocks in use
    # Since the engine was built.
    num_finished: int
    num_aborted: int
    num_preemptions: int
    prompt_tokens: int  # computed in prefill steps: without those found in the cache, again after a preemption
    generated_tokens: int
    prefix_cache_queries: int  # prompt tokens of all requests that were admitted
    prefix_cache_hits: int  # those of them that were in the cache
    prefix_cache_hit_rate: float
    prefill_steps: int
    decode_steps: int
    prefill_time: float
    decode_time: float


class Counters:
    """The running totals behind `EngineStats`."""

    def __init__(self) -> None:
        self.finished = 0
        self.aborted = 0
        self.generated_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.prompt_tokens = 0
        self.prefill_steps = self.decode_steps = 0
        self.prefill_time = self.decode_time = 0.0
        self._warned_at = (0, 0)  # preemptions and finished requests at the last warning
        self._patience = _MIN_PREEMPTIONS

    def count_step(self, is_prefill: bool, num_tokens: int, num_generated: int, seconds: float) -> None:
        if is_prefill:
            self.prefill_steps += 1
            self.prefill_time += seconds
            self.prompt_tokens += num_tokens
        else:
            self.decode_steps += 1
            self.decode_time += seconds
        self.generated_tokens += num_generated

    def count_finished(self, is_aborted: bool) -> None:
        if is_aborted:
            self.aborted += 1
        else:
            self.finished += 1

    def warn_if_thrashing(self, num_preemptions: int) -> None:
        """Warn when more sequences are thrown out than finish. Each warning makes the next one half as likely."""
        preempted, finished = num_preemptions - self._warned_at[0], self.finished - self._warned_at[1]
        if preempted < self._patience or preempted < finished:
            return
        logger.warning(
            "the KV cache is too small for what runs: %d preemptions while %d requests finished, and each one computes "
            "its tokens again; raise num_kvcache_blocks (or gpu_memory_utilization on a GPU), or lower max_num_seqs",
            preempted,
            finished,
        )
        self._warned_at = (num_preemptions, self.finished)
        self._patience *= 2

    def snapshot(self, scheduler: Scheduler) -> EngineStats:
        blocks = scheduler.block_manager
        # Of a copy, made in one go: who watches a `generate` from another thread sees the queue change.
        half_prefilled = sum(seq.row >= 0 for seq in scheduler.waiting.copy())
        num_used, num_blocks = len(blocks.used_block_ids), len(blocks.blocks)
        return EngineStats(
            num_running=len(scheduler.running) + half_prefilled,
            num_waiting=len(scheduler.waiting) - half_prefilled,
            num_kvcache_blocks=num_blocks,
            num_used_blocks=num_used,
            kv_occupancy=num_used / num_blocks,
            num_finished=self.finished,
            num_aborted=self.aborted,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            prefix_cache_hit_rate=self.prefix_cache_hits / max(self.prefix_cache_queries, 1),
            prefill_steps=self.prefill_steps,
            decode_steps=self.decode_steps,
            prefill_time=self.prefill_time,
            decode_time=self.decode_time,
        )
