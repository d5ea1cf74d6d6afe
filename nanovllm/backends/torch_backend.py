"""The reference backend: plain PyTorch, any device, any dtype. The other backends are tested against this one.

It gathers the keys and values out of the paged cache. Prefill goes sequence by sequence, through
`scaled_dot_product_attention` (SDPA); decode in masked batches of sequences of similar length, step by step, since
there the gathering takes as long as the arithmetic. Shapes as in `nanovllm.backends.base`.
"""

import torch
import torch.nn.functional as F

from nanovllm.backends.base import AttentionBackend
from nanovllm.utils.context import Context

# Keys, or values, that decode gathers at a time. They should still be in a CPU's cache when they are multiplied.
GROUP_BYTES = 1 << 20


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
        # The query heads of one KV head are the rows of a left matrix, so that no key is repeated. In float32 whatever
        # the dtype, as in kernels that keep scores in registers.
        q_heads = (q.float() * scale).view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = torch.zeros_like(q_heads)
        k_cells, v_cells = k_cache.view(-1, head_dim), v_cache.view(-1, head_dim)
        # One place for the gathered keys and then, when they are no longer needed, values of every group.
        scratch = q.new_empty(max((len(cells) for _, cells, _ in plan), default=0), head_dim)
        for rows, cells, bias in plan:
            gathered, heads = scratch[: len(cells)], len(rows) * num_kv_heads
            keys = torch.index_select(k_cells, 0, cells, out=gathered).view(heads, -1, head_dim).float()
            scores = torch.bmm(q_heads[rows].flatten(0, 1), keys.transpose(1, 2))
            weights = scores.view(len(rows), num_heads, -1).add_(bias).softmax(-1).view_as(scores)
            values = torch.index_select(v_cells, 0, cells, out=gathered).view(heads, -1, head_dim).float()
            out[rows] = torch.bmm(weights, values).view(len(rows), *out.shape[1:])
        return out.view(batch, num_heads, head_dim).to(q.dtype)

    def plan_decode(
        self, context: Context, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The sequences in groups of similar length: (rows [n], cells [n * Hkv * max_len], bias [n, 1, max_len]).

        A cell is a row of a cache viewed as [-1, D]; the bias is 0 for a key and -inf past a sequence's length. There
        it reads its own first token again, so that nothing else of the cache is touched and no NaN needs to be masked.
        Sequences of length 0 are in no group.
        """
        device = context.block_tables.device
        lens = context.context_lens.tolist()
        order = sorted((row for row, length in enumerate(lens) if length), key=lambda row: -lens[row])
        plan = []
        # Cells inside of a block, [Hkv, 1, block_size].
        inner = torch.arange(block_size * num_kv_heads, device=device).view(-1, num_kv_heads).t()[:, None]
        positions = torch.arange(lens[order[0]] if order else 0, device=device)
        while order:
            max_len = lens[order[0]]
            size = max(GROUP_BYTES // (max_len * num_kv_heads * head_dim * dtype.itemsize), 1)
            rows, order = torch.tensor(order[:size], device=device), order[size:]
            num_blocks = -(-max_len // block_size)
            first_cells = context.block_tables[rows, :num_blocks].long() * (block_size * num_kv_heads)
            cells = (first_cells[:, None, :, None] + inner).flatten(2)[:, :, :max_len]
            is_key = (positions[:max_len] < context.context_lens[rows, None])[:, None]
            cells = torch.where(is_key, cells, cells[:, :, :1])
            plan.append((rows, cells.flatten(), torch.where(is_key, 0.0, float("-inf"))))
        return plan


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
