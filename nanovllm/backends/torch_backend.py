"""The reference backend: plain PyTorch, any device, any dtype. The other backends are tested against this one.

It gathers the keys and values out of the paged cache. Prefill goes sequence by sequence, through
`scaled_dot_product_attention` (SDPA); decode in masked batches of sequences of similar length, step by step, since
there the gathering takes as long as the arithmetic. Shapes as in `nanovllm.backends.base`.
"""

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.backends.base import AttentionBackend
from nanovllm.utils.context import Context

# Keys, or values, that decode gathers at a time. They should still be in a CPU's cache when they are multiplied.
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
        q_start = k_start = 0
        for row, (q_len, k_len) in enumerate(zip(context.query_lens, context.key_lens, strict=True)):
            queries, packed_keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
            q_start, k_start = queries.stop, packed_keys.stop
            if not q_len:
                continue
            if context.block_tables is None:
                keys, values = k[packed_keys], v[packed_keys]
            else:
                keys = _gather_sequence(k_cache, context.block_tables[row], k_len)
                values = _gather_sequence(v_cache, context.block_tables[row], k_len)
            out[queries] = _causal_attention(q[queries], keys, values, scale)
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
        order, inverse, groups = plan
        is_float32 = q.dtype is torch.float32
        q_heads = q.index_select(0, order).float().view(-1, num_heads // num_kv_heads, head_dim)
        out_heads = torch.zeros_like(q_heads)
        k_cells, v_cells = k_cache.view(-1, head_dim), v_cache.view(-1, head_dim)
        # One place for the gathered keys and then, when they are no longer needed, values of every group.
        scratch = q.new_empty(max((cells.numel() for _, _, cells, _ in groups), default=0), head_dim)
        for first, num, cells, bias in groups:
            gathered = scratch.narrow(0, 0, cells.numel())
            torch.index_select(k_cells, 0, cells, out=gathered)
            keys = (gathered if is_float32 else gathered.float()).view(num, -1, head_dim)
            scores = torch.bmm(q_heads.narrow(0, first, num), keys.transpose(1, 2))
            weights = torch.add(bias, scores, alpha=scale).softmax(-1)
            torch.index_select(v_cells, 0, cells, out=gathered)
            values = (gathered if is_float32 else gathered.float()).view(num, -1, head_dim)
            torch.bmm(weights, values, out=out_heads.narrow(0, first, num))
        return out_heads.view(q.shape).index_select(0, inverse).to(q.dtype)

    def plan_decode(
        self, context: Context, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int, torch.Tensor, torch.Tensor]]]:
        """Rows by falling length [B], the inverse of that order, and the sequences in groups of similar length.

        A group is (the first of its KV heads, counted through all rows in that order; their number n; cells [n * len];
        bias [n, 1, len]), len being that of its longest sequence. A cell is a row of a cache viewed as [-1, D]; the
        bias is 0 for a key and -inf past a sequence's length. There a head reads its first token again, so that nothing
        else of the cache is touched and no NaN needs to be masked. Sequences of length 0 are in no group.
        """
        device = context.block_tables.device
        tables, lens = context.block_tables.cpu().numpy(), context.context_lens.cpu().numpy()
        order, num_rows = np.argsort(-lens, kind="stable"), np.count_nonzero(lens)
        positions = np.arange(lens.max(initial=0))
        blocks, offsets = np.divmod(positions, block_size)
        inner = offsets * num_kv_heads + np.arange(num_kv_heads)[:, None]  # cell inside of its block, [Hkv, len]
        groups, first = [], 0
        while first < num_rows:
            max_len = lens[order[first]]
            size = max(GROUP_BYTES // (max_len * num_kv_heads * head_dim * dtype.itemsize), 1)
            rows = order[first : min(first + size, num_rows)]
            first_cells = tables[rows].astype(np.int64) * (block_size * num_kv_heads)
            cells = first_cells[:, None, blocks[:max_len]] + inner[:, :max_len]
            is_key = positions[:max_len] < lens[rows, None, None]
            cells = np.where(is_key, cells, cells[:, :, :1]).reshape(-1)
            bias = np.where(is_key, np.float32(0), np.float32("-inf")).repeat(num_kv_heads, axis=0)
            arrays = (torch.from_numpy(array).to(device) for array in (cells, bias))
            groups.append((first * num_kv_heads, len(rows) * num_kv_heads, *arrays))
            first += size
        return torch.from_numpy(order).to(device), torch.from_numpy(order.argsort()).to(device), groups


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
