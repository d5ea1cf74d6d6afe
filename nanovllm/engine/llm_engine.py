"""The engine: one loop of schedule, run, commit over a queue of requests.

`LLM` drives it through `generate`; scripts that want the loop themselves call `add_request` and `step`.
"""

import logging
import os
import random
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, NoReturn

from nanovllm.config import Config, config_from_kwargs
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.inputs import Prompt, PromptEncoder, as_params_list
from nanovllm.engine.model_runner import ModelRunner, StepHandle
from nanovllm.engine.scheduler import Batch, Output, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.workers import Workers
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.dist import SINGLE
from nanovllm.utils.interrupts import deferred_interrupt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("nanovllm")

POOL_REMEDY = "raise num_kvcache_blocks, or gpu_memory_utilization on a GPU"

# A tokenizer has at least one of these.
_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


class LLMEngine:
    """Owns the scheduler, the model runner and the tokenizer."""

    def __init__(self, model: str, **kwargs: object) -> None:
        """`model`: a directory in Hugging Face layout, or a hub id; keywords are the fields of `Config`.

        Raises TypeError for an unknown keyword, ValueError for a value that cannot work, before weights are loaded.
        """
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
        self._lock = threading.RLock()
        self._seq_ids = count()
        self._seeds = random.Random(self.config.seed)
        self._in_flight: deque[tuple[Batch, StepHandle | None]] = deque()
        self._unreported: list[tuple[int, list[int]]] = []  # ended, for the next `step` to report

    # ------------------------------------------------------------------ requests

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """Check and queue one prompt, text or token ids; returns its request id."""
        with self._exclusive():
            (params,) = as_params_list(sampling_params, 1, self.encoder.vocab_size)
            (token_ids,) = self.encoder.encode([prompt])
            return self._queue(token_ids, params).seq_id

    def _queue(self, token_ids: list[int], params: SamplingParams) -> Sequence:
        room = self.max_model_len - len(token_ids)
        seq = Sequence(
            next(self._seq_ids),
            token_ids,
            params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            block_size=self.config.kvcache_block_size,
            seed=self._seeds.getrandbits(63),
        )
        self.scheduler.add(seq)
        return seq

    # ------------------------------------------------------------------ the loop

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Advance by one step.

        Returns the requests that ended, as (request id, completion ids), and the tokens of the step: prompt tokens
        computed, or minus the number of sequences decoded. `([], 0)` when there is nothing to do.
        """
        with self._exclusive():
            _, num_tokens = self._advance()
            finished, self._unreported = self._unreported, []
            return finished, num_tokens

    def _advance(self, launch: bool = True) -> tuple[list[Output], int]:
        """Launch step N, then settle step N-1 while the device works: the one loop body behind `step` and `generate`.

        Who owns what with a step in flight: its sequences' rows and blocks may be given to others at settling, since a
        later launch on the same stream comes after it; its ids come to the host in a buffer of their own; a prefix
        becomes shareable only when settled. Without `overlap` a step is settled before the next is launched.
        """
        depth = (2 if self.config.overlap else 1) if launch else 0
        try:
            while len(self._in_flight) < depth:
                with deferred_interrupt():
                    batch = self.scheduler.schedule()
                    if batch is None:
                        break
                    self._in_flight.append((batch, None))
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
        except BaseException as error:
            self._roll_back()
            if self._workers is None:
                raise
            # The ranks may have stopped at different places: nothing brings them back into step.
            self._fail(error)
        with deferred_interrupt():
            self._unreported += [(seq.seq_id, seq.completion_token_ids) for seq, _, reason in outputs if reason]
        return outputs, batch.num_tokens if batch.is_prefill else -len(batch.rows)

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
        self.scheduler.block_manager.reset_prefix_cache()

    # ------------------------------------------------------------------ life

    def exit(self) -> None:
        """End the other ranks and give back the device memory. May be called twice; takes no requests afterwards."""
        if self._finalizer is not None:
            self._finalizer()
        self.model_runner = self._workers = None

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()

    def _fail(self, error: BaseException) -> NoReturn:
        """End all ranks, then raise `error`, or the failure of another rank that is behind it."""
        explained = error
        if self._workers is not None:
            explained = self._workers.explain(error)
            self._workers.shut_down(grace_s=0)
            traceback.clear_frames(error.__traceback__)  # which may hold a CUDA graph, and that the group
        release(self._workers, self.model_runner)
        self.exit()
        if explained is error:
            raise error
        raise explained from error

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One thread at a time, on an engine that has not exited; anything else is refused rather than interleaved."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this engine is in use by another thread; give each thread an LLM of its own, or a lock")
        try:
            if self.model_runner is None:
                raise RuntimeError("this engine has exited; build a new LLM")
            yield
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


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """The checkpoint's own tokenizer; ValueError with the remedy if there is none."""
    from transformers import AutoTokenizer

    remedy = "add the tokenizer files, or pass skip_tokenizer_init=True and give token ids"
    # Where there is no vocabulary transformers 5 makes up an empty tokenizer, which turns every text into no tokens.
    if not any(os.path.exists(os.path.join(path, name)) for name in _VOCABULARY_FILES):
        raise ValueError(f"{path}: no tokenizer ({', '.join(_VOCABULARY_FILES)}) is in there; {remedy}")
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises what its many readers raise
        raise ValueError(f"{path}: no tokenizer could be loaded ({error}); {remedy}") from error


def eos_token_ids(config: Config, tokenizer: "PreTrainedTokenizerBase | None") -> set[int]:
    """Every id that ends a completion: those of generation_config.json, config.json and the tokenizer."""
    ids = set(config.model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return ids


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
