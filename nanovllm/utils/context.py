"""Per-step metadata, set by the `ModelRunner` before a forward pass and read by the attention layers and the model.

It travels beside the model instead of through it, so that model code keeps the signature `model(input_ids, positions)`.
Every device tensor in it belongs to the runner and is valid for the one forward pass between `set_context` and
`reset_context`; a captured CUDA graph keeps the static tensors that were in it at capture time.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Context:
    """Metadata of one step. T: tokens computed in the step; B: sequences in it; W: block-table width.

    Prefill fills the `cu_seqlens` group, decode fills `context_lens`. The `*_lens` lists repeat on the host what the
    device tensors say, for code that loops over sequences (the torch backend) and must not wait for the device.
    """

    is_prefill: bool = False
    slot_mapping: torch.Tensor | None = None  # [T] int32; cache slot of each computed token, -1: do not store
    block_tables: torch.Tensor | None = None  # [B, W] int32; None in a prefill whose keys are all in this step
    # Prefill. Key lengths end at the last token computed in this step, not at the end of the prompt.
    cu_seqlens_q: torch.Tensor | None = None  # [B + 1] int32
    cu_seqlens_k: torch.Tensor | None = None  # [B + 1] int32
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    query_lens: list[int] = field(default_factory=list)
    key_lens: list[int] = field(default_factory=list)
    logits_indices: torch.Tensor | None = None  # [S] int64; rows whose logits are wanted, None: all
    # The same step for the last layer's attention, with no more queries than `logits_indices`; None: with all.
    last_queries: "Context | None" = None
    # Decode. A padding row of a CUDA graph has length 0, slot -1 and must not read the cache.
    context_lens: torch.Tensor | None = None  # [B] int32, the token being computed included
    max_context_len: int = 0  # host bound on context_lens, which holds for every replay of a graph
    decode_plan: Any = None  # what the decode backend has worked out for all layers
    plain_step: Any = None  # what the first layer has worked out for all, without kernels

    def want_logits(self, rows: torch.Tensor | None) -> None:
        """Of these rows [S], None: of all, in the place of each sequence's last one."""
        self.logits_indices, self.last_queries = rows, None


class _Current(threading.local):
    """Of each thread its own: two engines may compute side by side in two threads."""

    def __init__(self) -> None:
        self.context = Context()


_current = _Current()


def get_context() -> Context:
    """The metadata of the step being computed in this thread."""
    return _current.context


def set_context(context: Context) -> None:
    """Publish the metadata of the step about to be computed."""
    _current.context = context


def reset_context() -> None:
    """Forget the step, so that nothing keeps its tensors alive and a stale read fails loudly."""
    _current.context = Context()
