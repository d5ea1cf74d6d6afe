"""Checks what an engine computes against the torch backend, token for token, on given sequences.

`bench.py` calls it after a timed run and the GPU tests call it for each backend: a fast engine that computes something
else is worth nothing. Known tokens are fed back ("teacher forcing") through the very path that generated them, prefill
backend, then decode steps through CUDA graphs where the engine has them, and every step's logits are compared with
those of one plain prefill of the whole sequence through the torch backend. On several ranks all of them take part.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nanovllm.backends.torch_backend import TorchBackend
from nanovllm.engine.cuda_graph import DecodeGraphs
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.row_tables import upload
from nanovllm.engine.scheduler import Batch


@dataclass(frozen=True, slots=True)
class LogitsReport:
    """How far the engine's logits are from the reference, over all compared positions."""

    num_positions: int
    max_error: float  # largest ||ours - reference|| / ||reference|| of a position; NaN if any logit is NaN
    mean_error: float
    same_argmax: float  # share of the positions


def check_logits(engine: LLMEngine, sequences: list[tuple[list[int], list[int]]]) -> LogitsReport:
    """Compare the engine's decode logits with the torch backend's on (prompt ids, completion ids) pairs.

    The engine must be idle; its prefix cache is reset, since the check writes into the cache. Raises ValueError if the
    sequences do not fit the engine all at once.
    """
    runner = engine.model_runner
    assert engine.is_finished(), "the check overwrites the KV cache, nothing may be running"
    engine.reset_prefix_cache()
    blocks = [-(-(len(prompt) + len(completion)) // runner.block_size) for prompt, completion in sequences]
    if len(sequences) > runner.max_num_rows or sum(blocks) > runner.num_kvcache_blocks:
        raise ValueError(f"{len(sequences)} sequences of {sum(blocks)} blocks do not fit the engine all at once")
    if engine._workers is not None:
        engine._workers.call("apply", _compare, sequences, blocks)
    error, match = _compare(runner, sequences, blocks)
    return LogitsReport(len(error), error.max().item(), error.mean().item(), match.mean().item())


def _compare(
    runner: ModelRunner, sequences: list[tuple[list[int], list[int]]], blocks: list[int]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Relative error of each position's logits, and whether the argmax is the same; None on ranks that have no logits.

    Every rank takes part.
    """
    references = [_reference_logits(runner, prompt, completion) for prompt, completion in sequences]
    errors, matches = [], []
    for t, rows, logits in _decode_logits(runner, sequences, blocks):
        if runner.group.rank > 0:
            continue
        reference = torch.stack([references[row][t] for row in rows]).float()
        logits = logits.float()
        errors.append((logits - reference).norm(dim=-1) / reference.norm(dim=-1))
        matches.append((logits.argmax(-1) == reference.argmax(-1)).float())
    return (torch.cat(errors), torch.cat(matches)) if errors else None


@torch.inference_mode()
def _reference_logits(runner: ModelRunner, prompt: list[int], completion: list[int]) -> torch.Tensor | None:
    """[len(completion), vocab]: row t stands behind the prompt and t completion tokens."""
    token_ids = prompt + completion[:-1]
    batch = Batch(is_prefill=True, rows=[runner.tables.pad_row], starts=[0], counts=[len(token_ids)], samples=[True])
    batch.token_ids = [token_ids]
    input_ids, positions, context = runner.prepare_prefill(batch)
    context.slot_mapping.fill_(-1)  # the cache is left alone
    context.want_logits(torch.arange(len(prompt) - 1, len(token_ids), device=runner.device))
    reference = TorchBackend()
    for layer in runner.attention_layers:
        layer.bind_backends(reference, reference)
    try:
        return runner.compute_logits(input_ids, positions, context)
    finally:
        for layer in runner.attention_layers:
            layer.bind_backends(runner.prefill_backend, runner.decode_backend)


@torch.inference_mode()
def _decode_logits(
    runner: ModelRunner, sequences: list[tuple[list[int], list[int]]], blocks: list[int]
) -> Iterator[tuple[int, list[int], torch.Tensor]]:
    """Yields (t, rows, logits [rows, vocab]) of every step t; t = 0 is the prefill. Logits are rank 0's alone."""

    def step(rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits = runner.decode_logits(rows, positions)
        return rows if logits is None else logits, None

    all_rows = list(range(len(sequences)))
    first_blocks = [sum(blocks[:row]) for row in all_rows]
    batch = Batch(is_prefill=True, rows=all_rows, starts=[0] * len(sequences))
    batch.token_ids = [prompt for prompt, _ in sequences]
    batch.counts = [len(prompt) for prompt, _ in sequences]
    batch.samples = [True] * len(sequences)
    batch.new_blocks = [(row, 0, list(range(first_blocks[row], first_blocks[row] + blocks[row]))) for row in all_rows]
    runner.tables.update(batch)
    yield 0, all_rows, runner.compute_logits(*runner.prepare_prefill(batch))

    graphs = None
    if runner.graphs is not None:
        graphs = DecodeGraphs(step, len(sequences), runner.tables.pad_row, runner.device)
        graphs.capture([len(sequences)])
    for t in range(1, max(len(completion) for _, completion in sequences)):
        rows = [row for row in all_rows if t < len(sequences[row][1])]
        tokens = [sequences[row][1][t - 1] for row in rows]
        positions = [len(sequences[row][0]) + t - 1 for row in rows]
        runner.tables.last_tokens[upload(rows, torch.int64, runner.device)] = upload(tokens, torch.int64, runner.device)
        if graphs is not None:
            yield t, rows, graphs.replay(rows, positions)[0]
        else:
            yield t, rows, step(*upload([rows, positions], torch.int64, runner.device))[0]
