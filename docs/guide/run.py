"""Runs of the bundled model, step by step on record: what the guide shows is copied here.

The engine is nanovllm's, unchanged; `Run` puts functions around some of its own that write down what they returned.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.detokenizer import make_decode
from nanovllm.engine.sequence import Sequence

MODEL = str(Path(__file__).resolve().parents[2] / "assets" / "tiny-qwen3")
BLOCK = 16  # tokens in a block; the default of 256 would make for long tables
CLEAR = 1e-3  # between the best two logits; another machine's float32 moves them by about 1e-5


@dataclass
class Step:
    """What one step was, copied when it was scheduled, and what came of it."""

    batch: SimpleNamespace  # the Batch's fields as they were
    seq_ids: list[int]
    tables: dict[int, list[int]]  # block table of every sequence that holds blocks, by sequence
    free: list[int]
    refs: list[int]
    is_hashed: list[bool]
    waiting: list[int]
    running: list[int]
    inputs: Any = None  # (input_ids, positions, Context) of a prefill, DecodeInputs of a decode
    logits: torch.Tensor | None = None
    ids: list[int] = field(default_factory=list)
    outputs: list[tuple[int, int, str | None]] = field(default_factory=list)  # (sequence, token, finish reason)


class Run:
    """An engine whose steps are written down by functions put around its own."""

    def __init__(self, **options: Any) -> None:
        defaults = dict(device="cpu", kvcache_block_size=BLOCK, max_num_seqs=4, seed=0, overlap=False)
        self.llm = LLM(MODEL, **(defaults | options))
        self.steps: list[Step] = []
        self.seqs: list[Sequence] = []
        self.events: list[tuple[str, int]] = []  # ("launch" or "settle", number of the step), in order
        self.preemptions: list[tuple[int, int]] = []  # (step that it made room for, sequence)
        self.shapes: dict[str, list[int]] = {}  # outputs of the model's parts in the first step
        self._settled = 0
        scheduler, runner = self.llm.scheduler, self.llm.model_runner
        around(scheduler, "add", lambda _, seq: self.seqs.append(seq))
        around(scheduler, "schedule", self._on_schedule)
        around(scheduler, "preempt", lambda _, seq: self.preemptions.append((len(self.steps), seq.seq_id)))
        around(scheduler, "postprocess", self._on_settle)
        around(runner, "launch", lambda *_: self.events.append(("launch", len(self.steps) - 1)))
        around(runner, "prepare_prefill", self._on_inputs)
        around(runner.tables, "decode_inputs", self._on_inputs)
        around(runner, "sampler", self._on_logits)
        for name, module in runner.model.named_modules():
            module.register_forward_hook(partial(self._on_module, name))

    def _on_schedule(self, batch: Any) -> None:
        if batch is None:
            return
        scheduler = self.llm.scheduler
        blocks = scheduler.block_manager
        holders = [*scheduler.running, *(seq for seq in scheduler.waiting if seq.row >= 0)]
        names = ("is_prefill", "rows", "starts", "counts", "samples", "token_ids", "new_rows", "new_blocks")
        step = Step(
            SimpleNamespace(**{name: getattr(batch, name) for name in names}),
            [seq.seq_id for seq in batch.seqs],
            {seq.seq_id: list(seq.block_table) for seq in holders},
            list(blocks.free_block_ids),
            [block.ref_count for block in blocks.blocks],
            [block.hash is not None for block in blocks.blocks],
            [seq.seq_id for seq in scheduler.waiting],
            [seq.seq_id for seq in scheduler.running],
        )
        self.steps.append(step)

    def _on_inputs(self, inputs: Any, *_: Any) -> None:
        self.steps[-1].inputs = inputs

    def _on_logits(self, ids: torch.Tensor, logits: torch.Tensor, *_: Any) -> None:
        best = logits.topk(2).values
        assert len(logits) == 0 or (best[:, 0] - best[:, 1]).min() > CLEAR, "too close for a page that must not change"
        self.steps[-1].logits, self.steps[-1].ids = logits, ids.tolist()

    def _on_settle(self, outputs: Any, *_: Any) -> None:
        self.steps[self._settled].outputs = [(seq.seq_id, token_id, reason) for seq, token_id, reason in outputs]
        self.events.append(("settle", self._settled))
        self._settled += 1

    def _on_module(self, name: str, module: torch.nn.Module, args: object, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        self.shapes.setdefault(name, list(output.shape))

    def add(self, *prompts: str, **params: Any) -> None:
        for prompt in prompts:
            self.llm.add_request(prompt, SamplingParams(**({"temperature": 0} | params)))

    def text(self, seq: Sequence, with_special_tokens: bool = False) -> str:
        """A sequence's completion."""
        return make_decode(self.llm.tokenizer, not with_special_tokens)(seq.completion_token_ids)

    def piece(self, token_id: int) -> str:
        """A token's text, as Markdown."""
        return f"`{make_decode(self.llm.tokenizer, False)([token_id])!r}`"

    def finish(self) -> None:
        while not self.llm.is_finished():
            self.llm.step()


def around(owner: Any, name: str, note: Callable[..., object]) -> None:
    """Have `note(result, *args)` called whenever `owner.name(*args)` has returned."""
    function = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        note(result, *args)
        return result

    setattr(owner, name, wrapped)
