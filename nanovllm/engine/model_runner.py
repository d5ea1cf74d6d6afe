"""Runs the model on one rank: owns the device, the weights, the KV cache, the row tables and the CUDA graphs.

`LLMEngine` builds one and feeds it `Batch`es. `launch` queues a step on the device and returns a handle at once;
`handle.wait()` gives the sampled ids; `run` is both.
"""

import gc
import logging
import math
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from nanovllm.backends import select_backends
from nanovllm.config import Config
from nanovllm.engine.cuda_graph import DecodeGraphs, graph_sizes
from nanovllm.engine.extras import Extras, PendingLogprobs, collect
from nanovllm.engine.row_tables import DecodeInputs, RowTables, upload
from nanovllm.engine.scheduler import Batch, StepLogprobs
from nanovllm.layers.attention import Attention
from nanovllm.layers.logits import RawLogprobs, raw_logprobs
from nanovllm.layers.sampler import Sampler
from nanovllm.models.registry import get_model_class
from nanovllm.utils.context import Context, reset_context, set_context
from nanovllm.utils.device import available_memory, resolve_device, resolve_dtype, zeros
from nanovllm.utils.dist import SINGLE, Group
from nanovllm.utils.loader import load_dummy, load_model

logger = logging.getLogger("nanovllm")

GIB = 1 << 30
LONG_CHUNKS = (300, 8192)  # chunks of each length for which a kernel has a configuration

# The default dtype belongs to the process: engines that are built in several threads take turns.
_default_dtype_lock = threading.Lock()


def start_download(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is complete once the stream has come this far."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class StepHandle:
    """The sampled ids of a launched step, and the log probabilities that were asked for, on their way to the host."""

    def __init__(self, ids: torch.Tensor, pending: list[PendingLogprobs]) -> None:
        # Buffers of their own: a graph's output is overwritten by the next replay, which these copies precede.
        self._ids = start_download(ids)
        self._pending = [p._replace(raw=RawLogprobs(*map(start_download, p.raw))) for p in pending]
        self._event = None
        if ids.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()
        self.logprobs: StepLogprobs | None = None  # there after `wait`, if any were asked for

    def wait(self) -> list[int]:
        """Block until the step is done; one id for each line of the batch that samples."""
        if self._event is not None:
            self._event.synchronize()
        self.logprobs = collect(self._pending)
        return self._ids.tolist()


class StartClock:
    """What the start spent its time on, for the log."""

    def __init__(self) -> None:
        self._last = perf_counter()
        self._laps: list[str] = []

    def lap(self, name: str) -> None:
        now = perf_counter()
        self._laps.append(f"{name} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._laps)


class ModelRunner:
    """One rank's model and cache."""

    @torch.inference_mode()
    def __init__(self, config: Config, group: Group = SINGLE) -> None:
        self.config = config
        self.group = group
        self.block_size = config.kvcache_block_size
        self.max_model_len = config.max_model_len
        self.device = resolve_device(config.device, group.rank if group.size > 1 else None)
        self.dtype = resolve_dtype(config, self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            self._start(config)
        except BaseException as error:
            # Now: the error's traceback keeps this object and its graphs, and they keep the memory and the group.
            traceback.clear_frames(error.__traceback__)
            self.exit()
            raise

    # ------------------------------------------------------------------ start

    def _start(self, config: Config) -> None:
        """Load the weights, find out how many blocks there is memory for, compile and capture; all ranks in step."""
        group = self.group
        clock = StartClock()
        self.model = self._load_model()
        clock.lap("weights")
        hidden_size = config.model_config.hidden_size
        group.use_peer_memory(hidden_size, config.max_num_seqs, self.dtype, self.device)
        self.sampler = Sampler()
        self.attention_layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        self._bind_backends()
        # Decode never takes more rows than the token budget, see Scheduler.
        self.max_num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.tables = RowTables(self.max_num_rows, -(-self.max_model_len // self.block_size), self.device)
        self.extras = Extras(self.tables, config.model_config.vocab_size, self.max_model_len, group)
        self.kv_cache: torch.Tensor | None = None
        self.graphs: DecodeGraphs | None = None
        use_graphs = self.device.type == "cuda" and not config.enforce_eager and self.decode_backend.supports_cuda_graph
        peak = 0
        if self.device.type == "cuda":
            self._bind_cache(1)  # to start with
            self._compile()
            clock.lap("kernels")
            peak = self._warm_up()
            clock.lap("warm-up")
        self.num_kvcache_blocks = self._num_kvcache_blocks(peak, use_graphs)
        # Block ids mean the same on every rank, so all have as many as the poorest.
        self.num_kvcache_blocks = group.min(self.num_kvcache_blocks, self.device)
        self._bind_cache(self.num_kvcache_blocks)
        if use_graphs:
            self.graphs = DecodeGraphs(self._decode, self.max_num_rows, self.tables.pad_row, self.device)
            self.graphs.capture(graph_sizes(self.max_num_rows))
        clock.lap("graphs")
        logger.info("%s, %d blocks of %d tokens; %s", self.device, self.num_kvcache_blocks, self.block_size, clock)

    def _load_model(self) -> torch.nn.Module:
        model_config = self.config.model_config
        model_class = get_model_class(model_config.architecture)
        with _default_dtype_lock:
            default_dtype = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            try:
                with self.device:
                    model = model_class(model_config, self.group)
            finally:
                torch.set_default_dtype(default_dtype)
        if self.config.load_format == "dummy":
            load_dummy(model, self.config.seed or 0, self.group.rank)
        else:
            load_model(model, self.config.model)
        return model.eval()

    def _bind_backends(self) -> None:
        layer = self.attention_layers[0]
        self.prefill_backend, self.decode_backend = select_backends(
            self.config.attention_backend,
            device=self.device,
            dtype=self.dtype,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=self.block_size,
        )
        for layer in self.attention_layers:
            layer.bind_backends(self.prefill_backend, self.decode_backend)

    def _warm_up(self) -> int:
        """Run the largest legal prefill, logits and sampler included; returns the most bytes it had allocated."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        num_tokens = self.config.max_num_batched_tokens
        # Full-length prompts, and never more of them than may run.
        lengths = [self.max_model_len] * (num_tokens // self.max_model_len) + [num_tokens % self.max_model_len]
        lengths = [n for n in lengths if n][: self.max_num_rows]
        input_ids, positions, context = self.prepare_prefill(self._dummy_prefill(lengths))
        # Every running sequence may end its prefill in one step.
        rows = torch.full((self.max_num_rows,), self.tables.pad_row, device=self.device)
        context.want_logits(torch.arange(self.max_num_rows, device=self.device) % sum(lengths))
        logits = self.compute_logits(input_ids, positions, context)
        self._sample(logits, rows, self.tables.temperatures[rows], self.tables.seeds[rows], rows, all_greedy=False)
        self.extras.warm_up(logits)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        return peak

    def _dummy_prefill(self, lengths: list[int], start: int = 0) -> Batch:
        """Prompts of token 0 in the padding row, from position `start` on."""
        batch = Batch(is_prefill=True, counts=lengths)
        batch.rows, batch.starts = [self.tables.pad_row] * len(lengths), [start] * len(lengths)
        batch.token_ids, batch.samples = [[0] * n for n in lengths], [True] * len(lengths)
        return batch

    def _compile(self) -> None:
        """Compile every kernel variant that a later step may need, so that nothing is compiled in the middle of work.

        Variants: short and long chunks, keys in the step or in the cache, and each number of rows that has kernels of
        its own. No kernel runs here: metadata that a kernel would have written comes from its plain twin.
        """
        from nanovllm.kernels.launch import compile_only
        from nanovllm.kernels.small_linear import MAX_ROWS

        tables, pad_row = self.tables, self.tables.pad_row
        longest = min(self.max_model_len - 1, self.config.max_num_batched_tokens)
        hidden_size = self.config.model_config.hidden_size
        with compile_only(self.device):
            # First what takes longest: the filters, then decode attention.
            logits = self.model.compute_logits(torch.zeros(1, hidden_size, dtype=self.dtype, device=self.device))
            if logits is not None:
                self.extras.compile(logits)
            for num_rows in range(MAX_ROWS + 1, 0, -1):
                rows, positions = upload([[pad_row] * num_rows, [0] * num_rows], torch.int64, self.device)
                tables.decode_inputs(rows, positions, self.block_size)
                inputs = tables.decode_inputs_plain(rows, positions, self.block_size)
                logits = self._decode_logits(inputs)
                if logits is not None:
                    self.extras.compile(logits)
                    for ends in (inputs.context_lens, positions):  # int32 in decode, int64 in prefill
                        self.sampler(logits, inputs.temperatures, inputs.seeds, ends)
            for length in {*range(1, MAX_ROWS + 1), *(min(n, longest) for n in LONG_CHUNKS)}:
                for start in (0, 1):
                    self.compute_logits(*self.prepare_prefill(self._dummy_prefill([length], start)))

    def _num_kvcache_blocks(self, peak: int, use_graphs: bool) -> int:
        if self.config.num_kvcache_blocks > 0:
            return self.config.num_kvcache_blocks
        layer = self.attention_layers[0]
        block_bytes = (
            2 * len(self.attention_layers) * self.block_size * layer.num_kv_heads * layer.head_dim * self.dtype.itemsize
        )
        blocks_per_seq = -(-self.max_model_len // self.block_size)
        if self.device.type == "cpu":
            wanted = self.config.max_num_seqs * blocks_per_seq
            return max(min(wanted, available_memory() // 4 // self.group.size // block_bytes), 1)
        graph_bytes = self._measure_graphs() if use_graphs else 0
        free, total = torch.cuda.mem_get_info()
        # What is in use now (weights, other processes) stays; the warm-up's peak comes on top of what is allocated now.
        used = total - free + (peak - torch.cuda.memory_allocated()) + graph_bytes
        budget = int(total * self.config.gpu_memory_utilization) - used
        if budget < block_bytes:
            raise ValueError(
                f"gpu_memory_utilization={self.config.gpu_memory_utilization} of {total / GIB:.1f} GiB leaves no room "
                f"for the KV cache: {used / GIB:.1f} GiB are taken by weights, activations and other processes, and "
                f"one block needs {(block_bytes - budget) / GIB:.2f} GiB more; raise gpu_memory_utilization, free GPU "
                f"memory, or lower max_num_batched_tokens or max_num_seqs"
            )
        return budget // block_bytes

    def _measure_graphs(self) -> int:
        """Bytes that all graphs will take, from capturing the two largest over a cache of one block.

        The first sets up the shared pool, each further one adds about as much as the second.
        """
        sizes = graph_sizes(self.max_num_rows)
        graphs = DecodeGraphs(self._decode, self.max_num_rows, self.tables.pad_row, self.device)
        free = [torch.cuda.mem_get_info()[0]]
        for size in sorted(sizes, reverse=True)[:2]:
            graphs.capture([size])
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
        graphs = None
        gc.collect()
        torch.cuda.empty_cache()
        first = max(free[0] - free[1], 0)
        further = max(free[1] - free[2], 0) if len(free) > 2 else 0
        return first + further * (len(sizes) - 1)

    def _bind_cache(self, num_blocks: int) -> None:
        """Allocate the cache, in place of an earlier one, and give every attention layer its slice."""
        self.kv_cache = None
        for layer in self.attention_layers:
            layer.bind_cache(None, None)
        layer = self.attention_layers[0]
        shape = (2, len(self.attention_layers), num_blocks, self.block_size, layer.num_kv_heads, layer.head_dim)
        try:
            self.kv_cache = zeros(shape, self.dtype, self.device)
        except (MemoryError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"num_kvcache_blocks={num_blocks} of {self.block_size} tokens need "
                f"{math.prod(shape) * self.dtype.itemsize / GIB:.1f} GiB, more than there is on {self.device}; lower "
                f"num_kvcache_blocks, or leave it at -1 for as many as memory allows"
            ) from error
        for layer, k_cache, v_cache in zip(self.attention_layers, *self.kv_cache, strict=True):
            layer.bind_cache(k_cache, v_cache)

    # ------------------------------------------------------------------ steps

    @torch.inference_mode()
    def launch(self, batch: Batch) -> StepHandle:
        """Queue one step on the device and return at once."""
        self.tables.update(batch)
        self.extras.update(batch)
        pending: list[PendingLogprobs] = []
        if batch.is_prefill:
            ids, logits, pending = self._launch_prefill(batch)
        elif self.graphs is not None and self.graphs.size_for(len(batch.rows)) is not None:
            ids, logits = self.graphs.replay(batch.rows, batch.starts)
        else:
            ids, logits = self._decode(*self.prepare_decode(batch), all_greedy=self.tables.all_greedy(batch.rows))
        return StepHandle(ids, pending + self.extras.apply(batch, ids, logits))

    def run(self, batch: Batch) -> list[int]:
        """Compute one step; one sampled id for each line of the batch that samples."""
        return self.launch(batch).wait()

    def prepare_prefill(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Context]:
        """Ids and positions [T] of all chunks end to end, and the metadata that says where each belongs."""
        rows, starts, counts, samples = (np.array(x) for x in (batch.rows, batch.starts, batch.counts, batch.samples))
        ends = starts + counts
        cu_seqlens_q = np.concatenate(([0], counts.cumsum()))
        cu_seqlens_k = np.concatenate(([0], ends.cumsum()))
        positions = np.arange(cu_seqlens_q[-1]) - np.repeat(cu_seqlens_q[:-1] - starts, counts)
        blocks = self.tables.block_tables_host[np.repeat(rows, counts), positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        token_ids = np.concatenate([np.array(ids) for ids in batch.token_ids])
        input_ids, device_positions = upload(np.stack((token_ids, positions)), torch.int64, self.device)
        context = Context(
            is_prefill=True,
            slot_mapping=upload(slots, torch.int32, self.device),
            cu_seqlens_q=upload(cu_seqlens_q, torch.int32, self.device),
            cu_seqlens_k=upload(cu_seqlens_k, torch.int32, self.device),
            max_seqlen_q=int(counts.max()),
            max_seqlen_k=int(ends.max()),
            query_lens=batch.counts,
            key_lens=ends.tolist(),
            logits_indices=upload(cu_seqlens_q[1:][samples] - 1, torch.int64, self.device),
        )
        if starts.any():  # some keys are in the cache only: a prefix hit, or a later chunk
            width = -(-context.max_seqlen_k // self.block_size)
            context.block_tables = self.tables.block_tables[upload(rows, torch.int64, self.device), :width]
        context.last_queries = replace(
            context,
            cu_seqlens_q=upload(np.concatenate(([0], samples.cumsum())), torch.int32, self.device),
            max_seqlen_q=1,
            query_lens=samples.astype(int).tolist(),
        )
        return input_ids, device_positions, context

    def _launch_prefill(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None, list[PendingLogprobs]]:
        input_ids, positions, context = self.prepare_prefill(batch)
        last_rows = context.logits_indices
        if batch.prompt_targets:  # which want all rows of the hidden states
            context.want_logits(None)
        hidden_states = self._forward(input_ids, positions, context)
        logits = self.model.compute_logits(hidden_states[last_rows] if batch.prompt_targets else hidden_states)
        pending = [self._prompt_logprobs(hidden_states, batch, *target) for target in batch.prompt_targets]
        lines = [i for i, samples in enumerate(batch.samples) if samples]
        rows = [batch.rows[i] for i in lines]
        ends = [batch.starts[i] + batch.counts[i] for i in lines]
        device_rows, device_ends = upload([rows, ends], torch.int64, self.device)
        tables = self.tables
        temperatures, seeds = tables.temperatures[device_rows], tables.seeds[device_rows]
        ids = self._sample(logits, device_rows, temperatures, seeds, device_ends, tables.all_greedy(rows))
        return ids, logits, pending if logits is not None else []

    def _prompt_logprobs(
        self, hidden_states: torch.Tensor, batch: Batch, line: int, num_top: int, targets: list[int]
    ) -> PendingLogprobs | None:
        """Log probabilities of `targets` behind the first tokens of a line, on rank 0.

        In chunks of rows, so that the logits of all of a long prompt never exist at once.
        """
        first = sum(batch.counts[:line])
        parts: list[RawLogprobs] = []
        for start in range(0, len(targets), self.extras.rows_per_chunk):
            some = targets[start : start + self.extras.rows_per_chunk]
            logits = self.model.compute_logits(hidden_states[first + start : first + start + len(some)])
            if logits is not None:
                parts.append(raw_logprobs(logits.float(), upload(some, torch.int64, self.device), num_top))
        if not parts:
            return None
        raw = RawLogprobs(*map(torch.cat, zip(*parts, strict=True)))
        return PendingLogprobs(True, [line] * len(targets), [num_top] * len(targets), raw)

    def prepare_decode(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and positions [B]: all that a decode step needs from the host."""
        rows, positions = upload([batch.rows, batch.starts], torch.int64, self.device)
        return rows, positions

    def _decode(
        self, rows: torch.Tensor, positions: torch.Tensor, all_greedy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One decode step, rows and positions [B] -> ids [B], logits [B, vocab]. Captured as it stands by graphs."""
        inputs = self.tables.decode_inputs(rows, positions, self.block_size)
        logits = self._decode_logits(inputs)
        # The new token stands right behind the context.
        ids = self._sample(logits, rows, inputs.temperatures, inputs.seeds, inputs.context_lens, all_greedy)
        return ids, logits

    @torch.inference_mode()
    def decode_logits(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Logits [B, vocab] behind each row's last token, whose K/V is written at its position; position -1 pads."""
        return self._decode_logits(self.tables.decode_inputs(rows, positions, self.block_size))

    def _decode_logits(self, inputs: DecodeInputs) -> torch.Tensor | None:
        layer = self.attention_layers[0]
        context = Context(
            slot_mapping=inputs.slot_mapping,
            block_tables=inputs.block_tables,
            context_lens=inputs.context_lens,
            # What holds for every replay of a graph; without one as well, so that both give the same bits.
            max_context_len=self.max_model_len,
        )
        context.decode_plan = self.decode_backend.plan_decode(
            context, self.block_size, layer.num_kv_heads, layer.head_dim, self.dtype
        )
        return self.compute_logits(inputs.input_ids, inputs.positions, context)

    def _sample(
        self,
        logits: torch.Tensor | None,
        rows: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        all_greedy: bool,
    ) -> torch.Tensor:
        """Sample one token per row on rank 0, and leave it on every rank where the next decode step reads it."""
        if logits is not None:
            ids = self.sampler(logits, temperatures, seeds, positions, all_greedy)
        else:
            ids = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        # On the device, without a trip to the host: the next step may be launched before anybody has seen the ids.
        ids = self.group.broadcast(ids)
        self.tables.last_tokens[rows] = ids
        return ids

    @torch.inference_mode()
    def compute_logits(self, input_ids: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor | None:
        """One forward pass; on rank 0 the logits [S, vocab] of the rows that the context names."""
        return self.model.compute_logits(self._forward(input_ids, positions, context))

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """Hidden states [S, hidden] of the rows that the context names."""
        set_context(context)
        try:
            return self.model(input_ids, positions)
        finally:
            reset_context()

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(self, *args)`: what rank 0 has all ranks call that is no method of this class."""
        return function(self, *args)

    def exit(self) -> None:
        """Give back the device memory. May be called twice, and on a half-built runner."""
        for name in ("graphs", "kv_cache", "tables", "extras", "model", "attention_layers"):
            setattr(self, name, None)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
