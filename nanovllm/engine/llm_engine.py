"""The engine: one loop of schedule, run, commit over a queue of requests.

`LLM` drives it through `generate` and `stream`; scripts that want the loop themselves call `add_request` and `step`.
"""

import logging
import random
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NoReturn

from nanovllm.config import Config, config_from_kwargs
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import make_decode
from nanovllm.engine.inputs import (
    Prompt,
    PromptEncoder,
    as_params_list,
    default_sampling_params,
    eos_token_ids,
    load_tokenizer,
    prompt_text,
)
from nanovllm.engine.model_runner import ModelRunner, StepHandle
from nanovllm.engine.outputs import ABORT, STOP, Request
from nanovllm.engine.scheduler import Batch, Output, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stats import Counters, EngineStats
from nanovllm.engine.workers import Workers
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.dist import SINGLE
from nanovllm.utils.interrupts import deferred_interrupt

logger = logging.getLogger("nanovllm")

POOL_REMEDY = "raise num_kvcache_blocks, or gpu_memory_utilization on a GPU"

Prepared = tuple[list[int], str | None, SamplingParams]
"""A checked prompt: its ids, its text if it came with one, its parameters."""


class LLMEngine:
    """Owns the scheduler, the model runner and the tokenizer."""

    def __init__(self, model: str | None = None, **kwargs: object) -> None:
        """`model`: a directory in Hugging Face layout, or a hub id; keywords are the fields of `Config`.

        Raises TypeError for an unknown keyword, ValueError for a value that cannot work, before weights are loaded.
        """
        self._lock = threading.RLock()
        self._abort_lock = threading.RLock()  # held while `_lock` is taken, and by an abort as long as it has `_lock`
        self._is_busy = False  # whoever has `_lock` is where a request may not end under its hands
        self._owner: int | None = None  # the thread that is busy
        self._is_exiting = False
        self._why_exited = ""
        self._requests: dict[int, Request] = {}  # all that have not ended, by id
        self._unreported: list[Request] = []  # ended, for the next `step` to report
        self.config = config_from_kwargs(model, kwargs)
        self.tokenizer = None if self.config.skip_tokenizer_init else load_tokenizer(self.config.model)
        self.model_runner: ModelRunner | None = None
        self._finalizer: weakref.finalize | None = None
        self._workers = Workers(self.config) if self.config.tensor_parallel_size > 1 else None
        try:
            self.model_runner = ModelRunner(self.config, SINGLE if self._workers is None else self._workers.group)
        except BaseException as error:
            self._fail(error)
        # Runs at the latest at interpreter exit, and does not keep the engine alive until then.
        self._finalizer = weakref.finalize(self, release, self._workers, self.model_runner)
        num_blocks = self.model_runner.num_kvcache_blocks
        self.max_model_len = fit_max_model_len(self.config, num_blocks)
        self.scheduler = Scheduler(
            BlockManager(num_blocks, self.config.kvcache_block_size, self.config.enable_prefix_caching),
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            eos_token_ids=eos_token_ids(self.config, self.tokenizer),
        )
        self.encoder = PromptEncoder(
            self.tokenizer,
            self.config.model_config.vocab_size,
            self.max_model_len,
            length_remedy(self.config, num_blocks),
        )
        self._num_ids = 0  # request ids given out so far
        self._decodes = {skip: make_decode(self.tokenizer, skip) for skip in (True, False)} if self.tokenizer else {}
        self._seeds = random.Random(self.config.seed)
        self._in_flight: deque[tuple[Batch, StepHandle | None]] = deque()
        self._followed: dict[int, Request] = {}  # those of `_requests` that stream or have stop strings
        self._to_abort: deque[Request] = deque()  # by anybody at any time; done between two steps
        self._counters = Counters()

    # ------------------------------------------------------------------ requests

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Check and queue one prompt (as for `generate`); returns its request id."""
        with self._exclusive():
            requests: list[Request] = []
            self._enqueue(self._prepare([prompt], sampling_params), requests, self._unreported)
            return requests[0].seq.seq_id

    def abort(self, request_id: int) -> bool:
        """End a request, wherever it is; its tokens so far stay, and its finish_reason is "abort".

        Returns whether it was still going on. `step` does not report it any more; a stream or a `generate` that waits
        for it does. May be called in the middle of a stream, and from another thread: it then takes effect between
        two steps. Raises ValueError for an id that this engine never gave out.
        """
        if isinstance(request_id, bool) or not isinstance(request_id, int):
            raise TypeError(f"request_id={request_id!r} must be an integer, as add_request returns it")
        if not 0 <= request_id < self._num_ids:
            known = f"they go from 0 to {self._num_ids - 1}" if self._num_ids else "it has given out none"
            raise ValueError(
                f"request_id={request_id} was never given out by this engine ({known}); pass what add_request "
                "returned, or the request_id of a stream's delta"
            )
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._abort([request])
        return True

    def _prepare(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None,
        add_special_tokens: bool = True,
        on_progress: Callable[[int], object] = lambda _: None,
    ) -> list[Prepared]:
        """Check and tokenize a batch of prompts. Whatever is wrong with it is raised here, before any is queued."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = as_params_list(sampling_params, len(prompts), self.encoder.vocab_size)
        if self.tokenizer is None and (with_stop := [i for i, one in enumerate(params) if one.stop]):
            raise ValueError(
                f"stop={params[with_stop[0]].stop!r} of prompt {with_stop[0]} needs a tokenizer, and "
                "skip_tokenizer_init=True left none; use stop_token_ids, or load the tokenizer"
            )
        token_ids = self.encoder.encode(prompts, add_special_tokens, on_progress)
        return list(zip(token_ids, map(prompt_text, prompts), params, strict=True))

    def _enqueue(
        self, batch: list[Prepared], requests: list[Request], outbox: list[Request], streams: bool = False
    ) -> None:
        """Queue a checked batch. The requests are appended to `requests`: an interrupt cannot lose them there."""
        with deferred_interrupt():
            for token_ids, text, params in batch:
                seq = self._make_sequence(token_ids, params)
                request = Request(seq, text, self._decodes, outbox, streams)
                requests.append(request)
                self._requests[seq.seq_id] = request
                if request.is_followed:
                    self._followed[seq.seq_id] = request
                self.scheduler.add(seq)

    def _make_sequence(self, token_ids: list[int], params: SamplingParams) -> Sequence:
        room = self.max_model_len - len(token_ids)
        self._num_ids += 1
        return Sequence(
            self._num_ids - 1,
            token_ids,
            params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            block_size=self.config.kvcache_block_size,
            seed=self._seeds.getrandbits(63),
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without sampling_params uses: SamplingParams with the values of generation_config.json."""
        return default_sampling_params(self.config.model)

    # ------------------------------------------------------------------ the loop

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Advance by one step.

        Returns the requests that ended, as (request id, completion ids), and the tokens of the step: prompt tokens
        computed, or minus the number of sequences decoded. `([], 0)` when there is nothing to do.
        """
        with self._exclusive():
            _, num_tokens = self._advance()
            finished = [(request.seq.seq_id, request.seq.completion_token_ids) for request in self._unreported]
            self._unreported.clear()
            return finished, num_tokens

    def _run(
        self, batch: list[Prepared], requests: list[Request], streams: bool = False
    ) -> Iterator[tuple[list[Any], int]]:
        """Queue a batch and step until all of it has ended: the generator behind `generate` and `stream`.

        Yields after each step the requests that have ended or, if they stream, the deltas of those that have something
        new, and the tokens of the step as `step` counts them. Closing it, an interrupt or a failure aborts what is left
        and leaves nothing of it queued or in flight. Between two steps the engine may be used for anything else.
        """
        outbox: list[Request] = []
        try:
            with self._exclusive():
                self._enqueue(batch, requests, outbox, streams)
            num_left = len(requests)
            while num_left:
                num_tokens = 0
                try:
                    with self._exclusive(also_after_exit=bool(outbox)):
                        if not outbox:  # else something else has driven the engine meanwhile
                            _, num_tokens = self._advance()
                        assert num_tokens or outbox, "nothing can run, and something is left to do"
                        news = list(dict.fromkeys(outbox))
                        outbox.clear()
                        num_left -= sum(request.seq.is_finished for request in news)
                        if streams:  # all at once: what is handed out one by one may be aborted meanwhile
                            news = [request.take_delta(request.seq.seq_id - requests[0].seq.seq_id) for request in news]
                except BaseException:
                    self._is_busy = False  # an interrupt may have struck where `_exclusive` was about to say so
                    raise
                yield news, num_tokens
        finally:
            with deferred_interrupt():
                self._abort([request for request in requests if request.seq.seq_id in self._requests])

    def _advance(self, launch: bool = True) -> tuple[list[Output], int]:
        """Launch step N, then settle step N-1 while the device works: the one loop body behind `step` and `_run`.

        Who owns what with a step in flight: its sequences' rows and blocks may be given to others at settling, since a
        later launch on the same stream comes after it; its ids come to the host in a buffer of their own; a prefix
        becomes shareable only when settled. Without `overlap` a step is settled before the next is launched.
        """
        depth = (2 if self.config.overlap else 1) if launch else 0
        start = perf_counter()
        try:
            self._abort_pending()
            while len(self._in_flight) < depth:
                with deferred_interrupt():
                    batch = self.scheduler.schedule()
                    if batch is None:
                        break
                    self._in_flight.append((batch, None))
                    self._note_scheduled(batch)
                if self._workers is not None:
                    self._workers.launch(batch)
                self._in_flight[-1] = (batch, self.model_runner.launch(batch))
            if not self._in_flight:
                return [], 0
            batch, handle = self._in_flight[0]
            token_ids = handle.wait()
            if self._workers is not None:
                self._workers.settled()
            with deferred_interrupt():
                outputs = self.scheduler.postprocess(batch, token_ids, handle.logprobs)
                self._in_flight.popleft()
                self._note_settled(batch, outputs, start)
        except BaseException as error:
            self._roll_back()
            if self._workers is None:
                raise
            # The ranks may have stopped at different places: nothing brings them back into step.
            self._fail(error)
        return outputs, batch.num_tokens if batch.is_prefill else -len(batch.rows)

    def _note_scheduled(self, batch: Batch) -> None:
        """Times and prefix hits of requests that start; a decode step starts none."""
        now = perf_counter()
        for seq in batch.seqs if batch.is_prefill else ():
            request = self._requests.get(seq.seq_id)
            if request is not None and request.scheduled_at is None:
                request.scheduled_at = now
                request.num_cached_tokens = seq.num_cached_tokens
                self._counters.prefix_cache_queries += seq.num_prompt_tokens
                self._counters.prefix_cache_hits += seq.num_cached_tokens

    def _note_settled(self, batch: Batch, outputs: list[Output], start: float) -> None:
        """Between commit and output: stop strings, what ended, times. Per token only where somebody asked for it."""
        now = perf_counter()
        self._counters.count_step(batch.is_prefill, batch.num_tokens, len(outputs), now - start)
        if batch.is_prefill:
            for seq, _, _ in outputs:
                request = self._requests[seq.seq_id]
                if request.first_token_at is None:
                    request.first_token_at = now
        for i, (seq, token_id, _) in enumerate(outputs if self._followed else ()):
            request = self._followed.get(seq.seq_id)
            if request is None:
                continue
            stop = request.follow()
            if stop is not None:
                self.scheduler.finish(seq, STOP, stop)
                # Also where the same token was the last one allowed, and has ended it already.
                seq.finish_reason, seq.stop_reason = STOP, stop
                outputs[i] = (seq, token_id, STOP)
            if request.streams:
                request.outbox.append(request)
        for seq, _, reason in outputs:
            if reason is not None:
                self._note_finished(self._requests[seq.seq_id], now)
        self._counters.warn_if_thrashing(self.scheduler.num_preemptions)

    def _note_finished(self, request: Request, now: float) -> None:
        seq = request.seq
        del self._requests[seq.seq_id]
        self._followed.pop(seq.seq_id, None)
        request.finished_at = now
        is_aborted = seq.finish_reason == ABORT
        self._counters.count_finished(is_aborted)
        # Whoever aborted a request of `add_request` knows of it; `step` reports completions.
        if not (is_aborted and request.outbox is self._unreported):
            request.outbox.append(request)

    def _abort(self, requests: list[Request]) -> None:
        """Abort `requests` between two steps: at once or, if the engine is in the middle of one, before the next."""
        self._to_abort.extend(requests)
        # Busy: another thread is, or this one, and a signal handler or the garbage collector called.
        while not self._is_busy:
            with self._abort_lock:
                if not self._lock.acquire(blocking=False):
                    return  # who has it sees to `_to_abort` at its end
                try:
                    self._enter()
                    self._abort_pending()
                    # Nobody would come to settle the step in flight, whose tokens belong to no one any more.
                    while self._in_flight and not self.scheduler.waiting and not self.scheduler.running:
                        self._advance(launch=False)
                finally:
                    self._leave()
            if not self._to_abort:  # else somebody found this thread busy
                return

    def _abort_pending(self) -> None:
        with deferred_interrupt():
            while self._to_abort:
                request = self._to_abort.popleft()
                if (
                    request.seq.seq_id in self._requests
                ):  # even if it has ended, in a step that failed behind its commit
                    self.scheduler.finish(request.seq, ABORT)
                    request.follow()
                    self._note_finished(request, perf_counter())

    def _roll_back(self) -> None:
        """Undo the steps in flight; their sequences will be computed again."""
        with deferred_interrupt():
            while self._in_flight:
                self.scheduler.rollback(self._in_flight.pop()[0])

    def is_finished(self) -> bool:
        """Whether no request is queued, running, or ended without having been reported by `step`."""
        return self.scheduler.is_finished() and not self._unreported

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their blocks."""
        with self._exclusive():
            self.scheduler.block_manager.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Queue lengths, KV occupancy, and what has been done since the engine was built; also after `exit`."""
        return self._counters.snapshot(self.scheduler)

    # ------------------------------------------------------------------ life

    def exit(self) -> None:
        """End the other ranks, give back the device memory, and abort what is left. May be called twice.

        Afterwards `generate`, `stream`, `chat`, `add_request`, `step` and `reset_prefix_cache` raise RuntimeError;
        `is_finished` is true, `abort` false, and `stats` keeps its totals. In the middle of a step, in another thread
        or under a signal handler, it takes effect at the end of the step.
        """
        self._is_exiting = True
        if self._is_busy and self._owner == threading.get_ident():
            return  # `_leave` sees to it
        # Held by nobody who is busy, the lock was left behind by an interrupt of the line that took it.
        while not (is_ours := self._lock.acquire(timeout=1)) and self._is_busy:
            pass
        try:
            self._shut()
        finally:
            if is_ours:
                self._lock.release()

    def _shut(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self.model_runner = self._workers = None
        if self._requests:
            self._roll_back()
            self._to_abort.extend(self._requests.values())
            self._abort_pending()
        self._unreported.clear()

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()

    def _fail(self, error: BaseException) -> NoReturn:
        """End all ranks, then raise `error`, or the failure of another rank that is behind it."""
        explained = error
        if self._workers is not None:
            explained = self._workers.explain(error)
            self._why_exited = f" (its ranks were ended by {type(explained).__name__})"
            self._workers.shut_down(grace_s=0)
            traceback.clear_frames(error.__traceback__)  # which may hold a CUDA graph, and that the group
        release(self._workers, self.model_runner)
        self._shut()
        if explained is error:
            raise error
        raise explained from error

    @contextmanager
    def _exclusive(self, also_after_exit: bool = False) -> Iterator[None]:
        """One thread at a time, on an engine that has not exited; anything else is refused rather than interleaved."""
        with self._abort_lock:  # an abort in another thread has the engine for a moment, and refuses it to nobody
            is_ours = self._lock.acquire(timeout=1 if self._is_exiting else 0)  # `exit` has it for a moment as well
        if not is_ours:
            raise RuntimeError("this engine is in use by another thread; give each thread an LLM of its own, or a lock")
        try:
            self._enter()
            if (self._is_exiting or self.model_runner is None) and not also_after_exit:
                raise RuntimeError(f"this engine has exited{self._why_exited}; build a new LLM")
            yield
        finally:
            self._leave()
            if self._to_abort:  # what came while the engine was busy
                self._abort([])

    def _enter(self) -> None:
        """Behind `_lock`, and undone by `_leave`: what ends requests waits until then."""
        self._owner = threading.get_ident()
        self._is_busy = True

    def _leave(self) -> None:
        self._is_busy, self._owner = False, None
        try:
            if self._is_exiting:
                self._shut()
        finally:
            self._lock.release()


def release(workers: Workers | None, runner: ModelRunner | None) -> None:
    """End the other ranks, then give back this one's memory; may be called twice.

    Needs no engine, so that it can outlive one. The group goes last: NCCL does not let go of a communicator while a
    CUDA graph uses it.
    """
    if workers is not None:
        workers.shut_down()
    if runner is not None:
        runner.exit()
    if workers is not None:
        workers.close()


def length_remedy(config: Config, num_blocks: int) -> str:
    """What to do about a prompt that is too long: it depends on what limits the length."""
    pool = num_blocks * config.kvcache_block_size
    if pool < config.max_model_len:
        return f"the KV cache holds {pool} tokens ({pool_text(config, num_blocks)}): shorten it, or {POOL_REMEDY}"
    if config.max_model_len == config.model_config.max_position_embeddings:
        return "that is all that the model can do (max_position_embeddings): shorten it"
    return "shorten it or raise max_model_len"


def pool_text(config: Config, num_blocks: int) -> str:
    return f"{num_blocks} blocks of {config.kvcache_block_size}"


def fit_max_model_len(config: Config, num_blocks: int) -> int:
    """`max_model_len`, lowered to what the pool can hold: a longer sequence could never finish, even alone."""
    pool = num_blocks * config.kvcache_block_size
    if pool >= config.max_model_len:
        return config.max_model_len
    logger.warning(
        "max_model_len=%d lowered to %d, the tokens that the KV cache holds (%s); for longer sequences %s",
        config.max_model_len,
        pool,
        pool_text(config, num_blocks),
        POOL_REMEDY,
    )
    return pool
