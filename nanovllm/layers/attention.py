"""From packed q, k, v to the attention output: norm, rotate, store K/V in the paged cache, attend.

The module owns no weights. The model hands it the norms and the rotary embedding with every call, so that on a GPU all
that precedes attention proper is one kernel; the `ModelRunner` binds it to its slice of the KV cache and to the
backends.
"""

from typing import NamedTuple

import torch
from torch import nn

from nanovllm.backends.base import AttentionBackend
from nanovllm.layers.layernorm import RMSNorm, unit_rms
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context, get_context


class Attention(nn.Module):
    """Causal attention of one layer over the paged cache."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Head counts are this rank's own."""
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.k_cache: torch.Tensor | None = None  # [blocks, block_size, kv_heads, head_dim]; a view, the runner owns it
        self.v_cache: torch.Tensor | None = None
        self.prefill_backend: AttentionBackend | None = None
        self.decode_backend: AttentionBackend | None = None

    def bind_backends(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill_backend, self.decode_backend = prefill, decode

    def bind_cache(self, k_cache: torch.Tensor | None, v_cache: torch.Tensor | None) -> None:
        """Without a cache (the warm-up) keys and values are used and thrown away."""
        self.k_cache, self.v_cache = k_cache, v_cache

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: RotaryEmbedding,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """qkv: [T, (heads + 2 * kv_heads) * head_dim], overwritten; positions: [T] -> [T, heads * head_dim].

        With `rows` [S], in prefill, the result is [S, heads * head_dim] of these; keys and values are stored of all.
        """
        context = get_context()
        if qkv.is_cuda and not context.is_prefill and self.decode_backend.fuses_decode:
            out = self.decode_backend.fused_decode(
                qkv, rotary_emb, q_norm, k_norm, self.num_heads, self.k_cache, self.v_cache, context, self.scale
            )
            return out.flatten(1)
        q, k, v = self._prepare(qkv, positions, rotary_emb, q_norm, k_norm, context)
        if context.is_prefill:
            if rows is not None and (context.last_queries is not None or not len(rows)):
                q, context, rows = q[rows], context.last_queries, None
            if not len(q):
                return q.flatten(1)
            out = self.prefill_backend.prefill(q, k, v, self.k_cache, self.v_cache, context, self.scale)
        else:
            out = self.decode_backend.decode(q, self.k_cache, self.v_cache, context, self.scale)
        return take_rows(out.flatten(1), rows)

    def _prepare(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: RotaryEmbedding,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        context: Context,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        if qkv.is_cuda:
            from nanovllm.kernels.qk_norm_rope import qk_norm_rope_store

            qk_norm_rope_store(
                qkv,
                positions,
                rotary_emb.cos_sin,
                q_norm.weight if q_norm else None,
                k_norm.weight if k_norm else None,
                q_norm.eps if q_norm else 0.0,
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                self.k_cache,
                self.v_cache,
                context.slot_mapping,
            )
            return qkv.view(len(qkv), sum(heads), self.head_dim).split(heads, dim=1)
        # Query and key heads side by side, so that each operation is one for both.
        heads_qkv = qkv.contiguous().view(-1, sum(heads), self.head_dim)  # of a few rows it may come by columns
        num_rotated = self.num_heads + self.num_kv_heads
        qk, v = heads_qkv.narrow(1, 0, num_rotated), heads_qkv.narrow(1, num_rotated, self.num_kv_heads)
        if q_norm:
            qk = unit_rms(qk, q_norm.eps_tensor)
            qk.narrow(1, 0, self.num_heads).mul_(q_norm.weight)
            qk.narrow(1, self.num_heads, self.num_kv_heads).mul_(k_norm.weight)
        step = context.plain_step
        if step is None:
            step = context.plain_step = PlainStep.of(positions, rotary_emb, context.slot_mapping)
        qk = rotary_emb.rotate(qk, *step.rotation)
        q, k = qk.narrow(1, 0, self.num_heads), qk.narrow(1, self.num_heads, self.num_kv_heads)
        if self.k_cache is not None:
            store_kvcache(k, v, self.k_cache, self.v_cache, step)
        return q, k, v


def take_rows(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """`x[rows]`; without rows all of `x`."""
    return x if rows is None else x[rows]


class PlainStep(NamedTuple):
    """What the layers of a step have in common where they run without kernels; the first one works it out."""

    rotation: tuple[torch.Tensor, torch.Tensor]  # see `RotaryEmbedding.at`
    slots: torch.Tensor | None  # int64, of the tokens to be stored
    stored: torch.Tensor | None  # which tokens these are, None: all

    @classmethod
    def of(cls, positions: torch.Tensor, rotary_emb: RotaryEmbedding, slots: torch.Tensor | None) -> "PlainStep":
        rotation = rotary_emb.at(positions)
        if slots is None or slots.min() >= 0:
            return cls(rotation, slots if slots is None else slots.long(), None)
        stored = (slots >= 0).nonzero().squeeze(1)
        return cls(rotation, slots[stored].long(), stored)


def store_kvcache(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, step: PlainStep
) -> None:
    """Write each token's K and V to its slot; slot -1 writes nothing. key, value: [T, kv_heads, head_dim]."""
    if step.stored is not None:
        key, value = key[step.stored], value[step.stored]
    k_cache.flatten(0, 1).index_copy_(0, step.slots, key)
    v_cache.flatten(0, 1).index_copy_(0, step.slots, value)
