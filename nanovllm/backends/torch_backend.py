"""The reference backend: plain PyTorch, any device, any dtype. The other backends are tested against this one.

It gathers the keys and values out of the paged cache. Prefill goes sequence by sequence, through
`scaled_dot_product_attention` (SDPA); decode in masked batches of sequences of similar length. Shapes as in
`nanovllm.backends.base`.
"""

import torch
import torch.nn.functional as F

from nanovllm.backends.base import AttentionBackend
from nanovllm.utils.context import Context

# Keys that decode gathers at a time. They should still be in a CPU's cache when they are multiplied.
GROUP_BYTES = 2 << 20


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
        plan = context.decode_plan or self.plan_decode(context, block_size, num_kv_heads, head_dim, q.dtype)
        # The query heads of one KV head are the rows of a left matrix, so that no key is repeated.
        grouped = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = torch.zeros_like(grouped)
        for rows, cells, bias in plan:
            keys, values = (
                cache.view(-1, head_dim).index_select(0, cells).view(len(rows), num_kv_heads, -1, head_dim)
                for cache in (k_cache, v_cache)
            )
            out[rows] = F.scaled_dot_product_attention(grouped[rows], keys, values, attn_mask=bias, scale=scale)
        return out.view(batch, num_heads, head_dim)

    def plan_decode(
        self, context: Context, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The sequences in groups of similar length: (rows [n], cells [n * Hkv * max_len], bias [n, 1, 1, max_len]).

        A cell is a row of a cache viewed as [-1, D]; the bias is 0 for a key and -inf past a sequence's length. There
        it reads its own first token again, so that nothing else of the cache is touched and no NaN needs to be masked.
        Sequences of length 0 are in no group.
        """
        lens = context.context_lens.tolist()
        rows = sorted((row for row, length in enumerate(lens) if length), key=lambda row: -lens[row])
        plan = []
        while rows:
            max_len = lens[rows[0]]
            size = max(GROUP_BYTES // (max_len * num_kv_heads * head_dim * dtype.itemsize), 1)
            plan.append(_plan_group(context, rows[:size], max_len, block_size, num_kv_heads, dtype))
            rows = rows[size:]
        return plan


def _plan_group(
    context: Context, rows: list[int], max_len: int, block_size: int, num_kv_heads: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device = context.block_tables.device
    index = torch.tensor(rows, device=device)
    positions = torch.arange(max_len, device=device)
    is_key = positions < context.context_lens[index, None]  # [n, max_len]
    blocks = context.block_tables.long()[index[:, None], positions // block_size]
    slots = blocks * block_size + positions % block_size
    slots = torch.where(is_key, slots, slots[:, :1])
    cells = slots[:, None] * num_kv_heads + torch.arange(num_kv_heads, device=device)[:, None]
    return index, cells.flatten(), torch.where(is_key, 0.0, float("-inf")).to(dtype)[:, None, None]


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
