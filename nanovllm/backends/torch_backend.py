"""The reference backend: plain PyTorch, any device, any dtype. The other backends are tested against this one.

It gathers the keys and values out of the paged cache. Prefill goes sequence by sequence, through
`scaled_dot_product_attention` (SDPA); decode is one masked batch. Shapes as in `nanovllm.backends.base`.
"""

import torch
import torch.nn.functional as F

from nanovllm.backends.base import AttentionBackend
from nanovllm.utils.context import Context


class TorchBackend(AttentionBackend):
    """Attention over gathered keys and values."""

    name = "torch"
    supports_cuda_graph = False  # the gathered copy is as long as the longest sequence of the step

    @classmethod
    def unavailable_reason(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> str | None:
        return None if block_size % 16 == 0 else f"kvcache_block_size={block_size} is not a multiple of 16"

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor | None,
        v_cache: torch.Tensor | None,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        start = 0
        for row, (q_len, k_len) in enumerate(zip(context.query_lens, context.key_lens, strict=True)):
            tokens = slice(start, start + q_len)
            start += q_len
            if context.block_tables is None:
                keys, values = k[tokens], v[tokens]
            else:
                keys = _gather_sequence(k_cache, context.block_tables[row], k_len)
                values = _gather_sequence(v_cache, context.block_tables[row], k_len)
            out[tokens] = _causal_attention(q[tokens], keys, values, scale)
        return out

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        batch, num_heads, head_dim = q.shape
        block_size, num_kv_heads = k_cache.shape[1:3]
        cells, bias = context.decode_plan or self.plan_decode(context, block_size, num_kv_heads, head_dim, q.dtype)
        # Gathered by head, [B, Hkv, max_len, D]: then both products are plain batched ones. The query heads of one KV
        # head are the rows of the left matrix, so that no key is repeated.
        keys, values = (
            cache.view(-1, head_dim).index_select(0, cells).view(batch, num_kv_heads, -1, head_dim)
            for cache in (k_cache, v_cache)
        )
        grouped = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = (grouped @ keys.transpose(2, 3)).float().mul_(scale).add_(bias)
        out = scores.softmax(dim=-1).to(q.dtype) @ values
        return torch.where(context.context_lens[:, None, None] > 0, out.view(batch, num_heads, head_dim), 0)

    def plan_decode(
        self, context: Context, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the keys lie, [B * Hkv * max_len] rows of a cache viewed as [-1, D], and 0 or -inf for each of them.

        Past its length a row reads its own first token again: always valid where a length is not 0, so that nothing
        else of the cache is touched and no NaN needs to be masked out of the values.
        """
        max_len = min(context.max_context_len, context.block_tables.shape[1] * block_size)
        device = context.block_tables.device
        lens = context.context_lens[:, None]
        positions = torch.arange(max_len, device=device)
        is_key = positions < lens  # [B, max_len]
        blocks = context.block_tables.long()[:, positions // block_size]
        slots = blocks * block_size + positions % block_size
        slots = torch.where(is_key, slots, torch.where(lens > 0, slots[:, :1], 0))
        cells = slots[:, None] * num_kv_heads + torch.arange(num_kv_heads, device=device)[:, None]
        return cells.flatten(), torch.where(is_key, 0.0, float("-inf"))[:, None, None]


def _gather_sequence(cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of one sequence, [length, Hkv, D], out of cache [blocks, bs, Hkv, D]."""
    num_blocks = -(-length // cache.shape[1])
    return cache.index_select(0, block_table[:num_blocks]).flatten(0, 1)[:length]


def _causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One sequence: q [q_len, Hq, D], k and v [k_len, Hkv, D]; the last query sees all keys. Returns [q_len, Hq, D]."""
    q_len, k_len = q.shape[0], k.shape[0]
    num_kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    mask = None
    if q_len != k_len:  # SDPA's is_causal would align the diagonal to the first key, not to the last
        mask = torch.ones(q_len, k_len, dtype=torch.bool, device=q.device).tril(k_len - q_len)
    # The KV heads are the batch: [Hkv, group, len, D], where the keys of a group are one tensor seen several times.
    out = F.scaled_dot_product_attention(
        q.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3),
        k.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
        v.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)
