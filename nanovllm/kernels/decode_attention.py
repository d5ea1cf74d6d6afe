"""Attention of one query token per sequence over the paged cache; called by the triton backend for decode.

Reading the cache is nearly all of the work, so everything here serves its bandwidth:
- A program reads one KV head for all query heads that share it, so that no key is read twice.
- A sequence is cut into splits of a fixed number of tokens, one program each. Few sequences get small splits, to fill
  the GPU; many get large ones, so that most have a single split, whose program writes the result itself. Of several
  splits, the program that finishes last puts their results together: no second kernel.
- The KV head is the fastest grid axis: in the cache the heads of a token are neighbours, and are read together.

The grid depends only on the host's bound on the lengths, so a CUDA graph can replay it with any lengths up to there: a
program past the end of its sequence leaves at once, and a sequence with more tokens than splits * split size gets
larger splits. Shapes as in `nanovllm.backends.base`; G: query heads per KV head; S: splits.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.paging import load_blocks, token_slots
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs

LOG2_E = 1.4426950408889634

# Tokens per split by batch * KV heads (first row that is large enough). Measured on an H200.
SPLIT_TOKENS = ((32, 64), (256, 128), (1024, 256), (1536, 512))
MAX_SPLIT_TOKENS = 1024
MAX_SPLITS = 128  # bounds the work of the program that combines them
MAX_PROGRAMS = 1 << 15  # bounds the programs that only find out that they are not needed, and the partial results

COMBINE_ELEMENTS = 4096  # partial results that the combining program takes at a time
NUM_COUNTERS = 1 << 16


@triton.jit
def _split_size(context_len, split_tokens, num_splits):
    """Tokens per split of this sequence: split_tokens, or the multiple of it that makes num_splits enough."""
    return split_tokens * tl.maximum(1, tl.cdiv(tl.cdiv(context_len, split_tokens), num_splits))


@triton.jit(do_not_specialize=["block_table_stride", "split_tokens", "num_splits"])
def _decode_kernel(
    out_ptr,  # [B, Hq, D]
    partial_out_ptr,  # [B, Hq, S, D] float32, normalised within the split
    partial_lse_ptr,  # [B, Hq, S] float32, log2 of the split's sum of exponentials
    arrivals_ptr,  # [B, Hkv] int32, 0 before and after
    q_ptr,  # [B, Hq, D]
    k_cache_ptr,  # [slots, Hkv, D]
    v_cache_ptr,  # [slots, Hkv, D]
    block_tables_ptr,  # [B, W]
    context_lens_ptr,  # [B]
    scale_log2,  # scale * log2(e): exponentials are powers of two here
    q_stride,
    block_table_stride,
    split_tokens,  # a multiple of TILE
    num_splits,
    HKV: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    G_POW2: tl.constexpr,
    COMBINE_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens_ptr + seq)
    split_size = _split_size(context_len, split_tokens, num_splits)
    start = split * split_size
    if (start >= context_len) & (split > 0):  # split 0 stays even at length 0, to write zeros
        return
    end = tl.minimum(start + split_size, context_len)

    group = tl.arange(0, G_PAD)
    dim = tl.arange(0, D_PAD)
    dim_mask = dim < D
    head = kv_head * G + group
    head_mask = (group < G)[:, None] & dim_mask[None, :]
    q = tl.load(q_ptr + seq.to(tl.int64) * q_stride + head[:, None] * D + dim[None, :], mask=head_mask, other=0.0)

    table_ptr = block_tables_ptr + seq.to(tl.int64) * block_table_stride
    column = kv_head * D + dim
    offsets = tl.arange(0, TILE)
    max_score = tl.full((G_PAD,), float("-inf"), tl.float32)
    denominator = tl.zeros((G_PAD,), tl.float32)
    acc = tl.zeros((G_PAD, D_PAD), tl.float32)
    next_blocks = load_blocks(table_ptr, start, end, TILE, BLOCK_SIZE)
    for tile in range(start, end, TILE):
        blocks = next_blocks
        next_blocks = load_blocks(table_ptr, tile + TILE, end, TILE, BLOCK_SIZE)
        valid = tile + offsets < end
        cell = token_slots(blocks, tile, TILE, BLOCK_SIZE)[:, None] * (HKV * D) + column[None, :]
        mask = valid[:, None] & dim_mask[None, :]
        # Each byte is read once: let it leave the L2 first. What is masked off reads as 0, so no NaN gets in.
        k = tl.load(k_cache_ptr + cell, mask=mask, other=0.0, eviction_policy="evict_first")
        v = tl.load(v_cache_ptr + cell, mask=mask, other=0.0, eviction_policy="evict_first")
        scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, axis=1))  # finite: a tile has at least one token
        shrink = tl.exp2(max_score - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        denominator = denominator * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        max_score = new_max

    acc /= tl.where(denominator > 0.0, denominator, 1.0)[:, None]
    row = seq.to(tl.int64) * (HKV * G) + head
    if context_len <= split_size:
        tl.store(out_ptr + row[:, None] * D + dim[None, :], acc, mask=head_mask)
    else:
        partial = row * num_splits + split
        tl.store(partial_out_ptr + partial[:, None] * D + dim[None, :], acc, mask=head_mask)
        tl.store(partial_lse_ptr + partial, max_score + tl.log2(denominator), mask=group < G)
        # All threads have written; the counter's release and acquire order these writes before the last one's reads.
        tl.debug_barrier()
        used_splits = tl.cdiv(context_len, split_size)
        counter_ptr = arrivals_ptr + seq * HKV + kv_head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == used_splits - 1:
            first_row = seq.to(tl.int64) * (HKV * G) + kv_head * G
            _combine(
                out_ptr, partial_out_ptr, partial_lse_ptr, first_row, used_splits, num_splits,
                G, G_POW2, D, D_PAD, COMBINE_TILE,
            )  # fmt: skip
            tl.store(counter_ptr, 0)


@triton.jit
def _combine(
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    first_row,  # of the group's query heads in [B * Hq]
    used_splits,
    num_splits,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Weigh the splits of the query heads of one KV head by their sums of exponentials."""
    group = tl.arange(0, G_POW2)
    dim = tl.arange(0, D_PAD)
    row = first_row + group
    mask = (group < G)[:, None] & (dim < D)[None, :]
    max_lse = tl.full((G_POW2,), float("-inf"), tl.float32)
    denominator = tl.zeros((G_POW2,), tl.float32)
    acc = tl.zeros((G_POW2, D_PAD), tl.float32)
    for first in range(0, used_splits, TILE):
        split = first + tl.arange(0, TILE)
        used = (split < used_splits)[:, None] & (group < G)[None, :]
        partial = row[None, :] * num_splits + split[:, None]  # [TILE, G]
        # Other programs wrote these: past the L1, which may hold older values.
        lse = tl.load(partial_lse_ptr + partial, mask=used, other=float("-inf"), cache_modifier=".cg")
        cell = partial[:, :, None] * D + dim[None, None, :]
        value = tl.load(
            partial_out_ptr + cell, mask=used[:, :, None] & (dim < D)[None, None, :], other=0.0, cache_modifier=".cg"
        )
        new_max = tl.maximum(max_lse, tl.max(lse, axis=0))
        new_max = tl.where(group < G, new_max, 0.0)  # keeps the padding free of inf - inf
        shrink = tl.exp2(max_lse - new_max)
        weights = tl.exp2(lse - new_max[None, :])
        denominator = denominator * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * value, axis=0)
        max_lse = new_max
    out = acc / tl.where(group < G, denominator, 1.0)[:, None]
    tl.store(out_ptr + row[:, None] * D + dim[None, :], out, mask=mask)


_counters: dict[torch.device, torch.Tensor] = {}


def arrival_counters(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` zeros. They outlive every graph that was captured with them, and each use leaves zeros behind.

    Steps on one stream share them. (Two streams of one device must not run this kernel side by side; no engine does.)
    """
    if device not in _counters or len(_counters[device]) < count:
        _counters[device] = torch.zeros(max(count, NUM_COUNTERS), dtype=torch.int32, device=device)
    return _counters[device]


def plan_splits(batch: int, num_kv_heads: int, max_context_len: int) -> tuple[int, int]:
    """(tokens per split, number of splits) for lengths up to `max_context_len`; beyond the caps splits grow larger."""
    rows = batch * num_kv_heads
    tokens = next((tokens for limit, tokens in SPLIT_TOKENS if rows <= limit), MAX_SPLIT_TOKENS)
    splits = min(triton.cdiv(max_context_len, tokens), MAX_SPLITS, MAX_PROGRAMS // rows)
    return tokens, max(splits, 1)


def _tile_config(split_tokens: int, row_bytes: int) -> tuple[int, int]:
    """(tokens per tile, num_stages); row_bytes is what one padded key takes.

    num_stages - 1 tiles are on their way at a time. No configuration takes more than 85 KB of shared memory, so that a
    multiprocessor of an H200 holds two or three programs, and every GPU since Ampere at least one.
    """
    if row_bytes > 512:  # float32 with head_dim above 128
        return (16, 2)
    if row_bytes > 256:  # float32, or head_dim above 128
        return (64, 2)
    return (128, 2) if split_tokens >= 512 else (64, 3)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
) -> torch.Tensor:
    """q [B, Hq, D] (a token's heads contiguous), caches [blocks, bs, Hkv, D] contiguous, block_tables [B, W] int32,
    context_lens [B] int32, none above the host's bound max_context_len. Returns [B, Hq, D]; zeros at length 0."""
    batch, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    assert q.stride()[1:] == (head_dim, 1) and block_tables.stride(1) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "a layer's cache is one contiguous slice"
    split_tokens, num_splits = plan_splits(batch, num_kv_heads, max_context_len)
    group = num_heads // num_kv_heads
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    tile, num_stages = _tile_config(split_tokens, dim_pad * q.element_size())
    out = torch.empty((batch, num_heads, head_dim), dtype=q.dtype, device=q.device)
    # With one split nothing is partial; empty tensors keep the pointers' types, hence the compiled kernel, the same.
    rows = batch * num_heads * num_splits if num_splits > 1 else 0
    partial_out = torch.empty((rows, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((rows,), dtype=torch.float32, device=q.device)
    _decode_kernel[(num_kv_heads, batch, num_splits)](
        out,
        partial_out,
        partial_lse,
        arrival_counters(q.device, batch * num_kv_heads),
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        scale * LOG2_E,
        q.stride(0),
        block_tables.stride(0),
        split_tokens,
        num_splits,
        HKV=num_kv_heads,
        G=group,
        G_PAD=max(16, triton.next_power_of_2(group)),  # 16: the least that tl.dot takes
        D=head_dim,
        D_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        TILE=tile,
        G_POW2=triton.next_power_of_2(group),
        COMBINE_TILE=max(COMBINE_ELEMENTS // (triton.next_power_of_2(group) * dim_pad), 1),
        num_warps=4,
        num_stages=num_stages,
        **pdl_options(q.device),
    )
    return out
