"""Attention of one query token per sequence over the paged cache; called by the triton backend for decode.

Reading the cache is nearly all of the work, so everything here serves its bandwidth:
- A program reads one KV head for all query heads that share it, so that no key is read twice.
- A sequence is cut into pieces, one program each: the shortest pieces with which all programs run at once, or, where
  those would be longer than 1,024 tokens, pieces of that many. The host fixes only the grid, which a CUDA graph
  replays; a tiny kernel draws up the plan on the device once a step, for all layers.
- The longest pieces start first (Graham, 1969), so that the last ones to run are short and all multiprocessors finish
  at about the same time.
- The program of a whole sequence writes the result itself. Of several pieces, the program that finishes last puts their
  results together: no second kernel.
- The KV head is the fastest grid axis: in the cache the heads of a token are neighbours, and are read together.

FUSED, the kernel also does what precedes attention in a decode step (as `qk_norm_rope.py` does it for prefill): it
normalises and rotates the query and the new key, and stores the new key and value. Nobody reads those two from the
cache in the same launch: the program with the last piece of a sequence takes them from its registers.

Shapes as in `nanovllm.backends.base`; G: query heads per KV head; P: programs per KV head. A tile is TILE tokens of one
sequence, counted over the tokens that are in the cache; every sequence has at least one.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch
from nanovllm.kernels.paging import load_blocks, token_slots
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs

LOG2_E = 1.4426950408889634

LONG_PIECE = 1024  # tokens
PROGRAMS_AT_ONCE = 3  # of a multiprocessor
MAX_WAVES = 5  # of programs, which cut a few long sequences
LENGTHS_AT_ONCE = 256  # sequences that the plan looks at in one go
RIVALS_AT_ONCE = 32  # sequences that it compares each of them with at a time
PLAN_FIELDS = 5
COMBINE_ELEMENTS = 4096  # partial results that the combining program takes at a time
NUM_COUNTERS = 1 << 16


@triton.jit
def _num_tiles(context_lens_ptr, seq, num_seqs, TILE: tl.constexpr, FUSED: tl.constexpr):
    """Tiles of the sequences `seq`, at least one each; 0 past the last. FUSED, the newest token is not in the cache."""
    cached = tl.load(context_lens_ptr + seq, mask=seq < num_seqs, other=0) - (1 if FUSED else 0)
    return tl.where(seq < num_seqs, tl.maximum(tl.cdiv(cached, TILE), 1), 0)


@triton.jit
def _store_entry(entry_ptr, seq, index, num_pieces, size, first_slot, mask):
    tl.store(entry_ptr, seq, mask=mask)
    tl.store(entry_ptr + 1, index, mask=mask)
    tl.store(entry_ptr + 2, num_pieces, mask=mask)
    tl.store(entry_ptr + 3, size, mask=mask)
    tl.store(entry_ptr + 4, first_slot, mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "wave"])
def _plan_kernel(
    plan_ptr,  # [P, PLAN_FIELDS] int32: sequence (-1: no piece), index of the piece in it, its number of pieces, tiles
    #            per piece, slot of its first partial result
    context_lens_ptr,  # [B]
    num_seqs,
    num_programs,
    wave,  # programs that run at a time
    TILE: tl.constexpr,
    FUSED: tl.constexpr,
    MAX_SIZE: tl.constexpr,  # tiles of a long piece
    LENGTHS: tl.constexpr,
    RIVALS: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    sizes = 1 + tl.arange(0, MAX_SIZE)
    counts = tl.zeros((MAX_SIZE,), tl.int32)  # pieces of each size that all sequences make
    total = 0
    for first in range(0, num_seqs, LENGTHS):
        tiles = _num_tiles(context_lens_ptr, first + tl.arange(0, LENGTHS), num_seqs, TILE, FUSED)
        counts += tl.sum(tl.cdiv(tiles[:, None], sizes[None, :]), axis=0)
        total += tl.sum(tiles, axis=0)
    size = tl.min(tl.where(counts <= wave, sizes, MAX_SIZE), axis=0)
    # A sequence has at most one piece that is shorter: num_seqs + total // size pieces are enough for all.
    size = tl.maximum(size, tl.cdiv(total, num_programs - num_seqs))
    # Whole pieces first, then the remainders, the longest ahead. A sequence's results lie side by side all the same.
    planned, slot = 0, 0
    for first in range(0, num_seqs, LENGTHS):
        seq = first + tl.arange(0, LENGTHS)
        tiles = _num_tiles(context_lens_ptr, seq, num_seqs, TILE, FUSED)
        whole, pieces = tiles // size, tl.cdiv(tiles, size)
        first_slot = slot + tl.cumsum(pieces, axis=0) - pieces
        entry_ptr = plan_ptr + (planned + tl.cumsum(whole, axis=0) - whole) * FIELDS
        for index in range(0, tl.max(whole, axis=0)):
            _store_entry(entry_ptr + index * FIELDS, seq, index, pieces, size, first_slot, index < whole)
        planned += tl.sum(whole, axis=0)
        slot += tl.sum(pieces, axis=0)
    num_whole, slot = planned, 0
    for first in range(0, num_seqs, LENGTHS):
        seq = first + tl.arange(0, LENGTHS)
        tiles = _num_tiles(context_lens_ptr, seq, num_seqs, TILE, FUSED)
        pieces, rest = tl.cdiv(tiles, size), tiles % size
        first_slot = slot + tl.cumsum(pieces, axis=0) - pieces
        rank = tl.zeros((LENGTHS,), tl.int32)
        for first_rival in range(0, num_seqs, RIVALS):
            rival = first_rival + tl.arange(0, RIVALS)
            rival_rest = (_num_tiles(context_lens_ptr, rival, num_seqs, TILE, FUSED) % size)[None, :]
            is_tie = (rival_rest == rest[:, None]) & (rival[None, :] < seq[:, None])
            rank += tl.sum(((rival_rest > rest[:, None]) | is_tie).to(tl.int32), axis=1)
        _store_entry(plan_ptr + (num_whole + rank) * FIELDS, seq, tiles // size, pieces, size, first_slot, rest > 0)
        planned += tl.sum((rest > 0).to(tl.int32), axis=0)
        slot += tl.sum(pieces, axis=0)
    for first in range(planned, num_programs, LENGTHS):
        program = first + tl.arange(0, LENGTHS)
        tl.store(plan_ptr + program * FIELDS, -1, mask=program < num_programs)


@triton.jit(do_not_specialize=["block_table_stride"])
def _decode_kernel(
    out_ptr,  # [B, Hq, D]
    partial_out_ptr,  # [Hkv, P, G, D] float32, normalised within the piece
    partial_lse_ptr,  # [Hkv, P, G] float32, log2 of the piece's sum of exponentials
    arrivals_ptr,  # [B, Hkv] int32, 0 before and after
    plan_ptr,  # [P, PLAN_FIELDS] int32, see _plan_kernel
    q_ptr,  # [B, Hq, D]; FUSED: [B, (Hq + 2 * Hkv) * D], q, k, v as projected
    k_cache_ptr,  # [slots, Hkv, D]
    v_cache_ptr,  # [slots, Hkv, D]
    block_tables_ptr,  # [B, W]
    context_lens_ptr,  # [B]
    cos_sin_ptr,  # [max_pos, D] float32, D / 2 cosines and D / 2 sines; None unless FUSED
    q_weight_ptr,  # [D], None without NORM
    k_weight_ptr,  # [D], None without NORM
    scale_log2,  # scale * log2(e): exponentials are powers of two here
    eps,
    q_stride,
    block_table_stride,
    HKV: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    G_POW2: tl.constexpr,
    COMBINE_TILE: tl.constexpr,
    PLAN_FIELDS: tl.constexpr,
    FUSED: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    kv_head, program = tl.program_id(0), tl.program_id(1)
    entry_ptr = plan_ptr + program * PLAN_FIELDS
    seq = tl.load(entry_ptr)
    if seq < 0:
        return
    index = tl.load(entry_ptr + 1)
    num_pieces = tl.load(entry_ptr + 2)
    piece_size = tl.load(entry_ptr + 3) * TILE
    first_slot = tl.load(entry_ptr + 4)
    context_len = tl.load(context_lens_ptr + seq)

    row = tl.arange(0, G_PAD)
    dim = tl.arange(0, D_PAD)
    dim_mask = dim < D
    head = kv_head * G + row
    head_mask = (row < G)[:, None] & dim_mask[None, :]
    column = kv_head * D + dim
    table_ptr = block_tables_ptr + seq.to(tl.int64) * block_table_stride
    q_row_ptr = q_ptr + seq.to(tl.int64) * q_stride
    if FUSED:
        num_cached = context_len - 1
        q = _norm_and_rotate(
            q_row_ptr, row, kv_head, cos_sin_ptr, q_weight_ptr, k_weight_ptr, tl.maximum(num_cached, 0), eps,
            HKV, G, D, D_PAD, NORM,
        )  # fmt: skip
    else:
        num_cached = context_len
        q = tl.load(q_row_ptr + head[:, None] * D + dim[None, :], mask=head_mask, other=0.0)
    max_score = tl.full((G_PAD,), float("-inf"), tl.float32)
    denominator = tl.zeros((G_PAD,), tl.float32)
    acc = tl.zeros((G_PAD, D_PAD), tl.float32)
    if FUSED and (index == num_pieces - 1) & (context_len > 0):
        new_v = tl.load(q_row_ptr + (HKV * (G + 1) + kv_head) * D + dim, mask=dim_mask, other=0.0)
        block = tl.load(table_ptr + num_cached // BLOCK_SIZE).to(tl.int64)
        cell = (block * BLOCK_SIZE + num_cached % BLOCK_SIZE) * (HKV * D) + column
        new_k = tl.sum(tl.where((row == G)[:, None], q.to(tl.float32), 0.0), axis=0)
        tl.store(k_cache_ptr + cell, new_k, mask=dim_mask)
        tl.store(v_cache_ptr + cell, new_v, mask=dim_mask)
        max_score = tl.sum(q.to(tl.float32) * new_k[None, :], axis=1) * scale_log2
        denominator += 1.0
        acc += new_v.to(tl.float32)[None, :]

    start_of_piece = index * piece_size
    end = tl.minimum(start_of_piece + piece_size, num_cached)
    offsets = tl.arange(0, TILE)
    next_blocks = load_blocks(table_ptr, start_of_piece, end, TILE, BLOCK_SIZE)
    for start in range(start_of_piece, end, TILE):
        blocks = next_blocks
        next_blocks = load_blocks(table_ptr, start + TILE, end, TILE, BLOCK_SIZE)
        valid = start + offsets < end
        cell = token_slots(blocks, start, TILE, BLOCK_SIZE)[:, None] * (HKV * D) + column[None, :]
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

    acc /= tl.where(denominator > 0.0, denominator, 1.0)[:, None]  # 0 at length 0 only
    if num_pieces == 1:
        out_row = seq.to(tl.int64) * (HKV * G) + head
        tl.store(out_ptr + out_row[:, None] * D + dim[None, :], acc, mask=head_mask)
    else:
        first_piece = kv_head * tl.num_programs(1) + first_slot
        partial = (first_piece + index) * G + row
        tl.store(partial_out_ptr + partial[:, None] * D + dim[None, :], acc, mask=head_mask)
        tl.store(partial_lse_ptr + partial, max_score + tl.log2(denominator), mask=row < G)
        # All threads have written; the counter's release and acquire order these writes before the last one's reads.
        tl.debug_barrier()
        counter_ptr = arrivals_ptr + seq * HKV + kv_head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_pieces - 1:
            _combine(
                out_ptr + (seq.to(tl.int64) * HKV + kv_head) * (G * D), partial_out_ptr, partial_lse_ptr,
                first_piece, num_pieces, G, G_POW2, D, D_PAD, COMBINE_TILE,
            )  # fmt: skip
            tl.store(counter_ptr, 0)


@triton.jit
def _norm_and_rotate(
    qkv_row_ptr,
    row,  # [G_PAD] 0 .. G: the group's query heads; G: its key
    kv_head,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    position,
    eps,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    NORM: tl.constexpr,
):
    """The query heads of one KV head and its new key, [G_PAD, D_PAD], ready for attention; rounds as qk_norm_rope.py.

    RoPE pairs dimension d with d + D / 2: each is loaded beside its partner, which saves moving them between threads.
    """
    HALF: tl.constexpr = D // 2
    dim = tl.arange(0, D_PAD)
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    is_key = (row == G)[:, None]
    mask = (row <= G)[:, None] & (dim < D)[None, :]
    row_ptr = qkv_row_ptr + (tl.where(row < G, kv_head * G + row, HKV * G + kv_head) * D)[:, None]
    x = tl.load(row_ptr + dim[None, :], mask=mask, other=0.0)
    y = tl.load(row_ptr + partner[None, :], mask=mask, other=0.0)
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if NORM:
        inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x_weight = _weight(q_weight_ptr, k_weight_ptr, dim, dim < D, is_key)
        y_weight = _weight(q_weight_ptr, k_weight_ptr, partner, dim < D, is_key)
        x = ((x * inverse_rms).to(dtype).to(tl.float32) * x_weight).to(dtype).to(tl.float32)
        y = ((y * inverse_rms).to(dtype).to(tl.float32) * y_weight).to(dtype).to(tl.float32)
    angle_ptr = cos_sin_ptr + position.to(tl.int64) * D + tl.where(dim < HALF, dim, partner)
    cos = tl.load(angle_ptr, mask=dim < D, other=0.0)[None, :]
    sin = tl.load(angle_ptr + HALF, mask=dim < D, other=0.0)[None, :]
    return (x * cos + tl.where(dim < HALF, -1.0, 1.0)[None, :] * (y * sin)).to(dtype)


@triton.jit
def _weight(q_weight_ptr, k_weight_ptr, dim, mask, is_key):
    """Norm weights at `dim`, [G_PAD, D_PAD]: the key's in its row, the query's in the others."""
    q_weight = tl.load(q_weight_ptr + dim, mask=mask, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + dim, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_key, k_weight[None, :], q_weight[None, :])


@triton.jit
def _combine(
    out_ptr,  # [G, D] of one sequence and KV head
    partial_out_ptr,
    partial_lse_ptr,
    first_piece,  # of the sequence, counted over all KV heads
    num_pieces,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Weigh the pieces of a sequence by their sums of exponentials."""
    group = tl.arange(0, G_POW2)
    dim = tl.arange(0, D_PAD)
    mask = (group < G)[:, None] & (dim < D)[None, :]
    max_lse = tl.full((G_POW2,), float("-inf"), tl.float32)
    denominator = tl.zeros((G_POW2,), tl.float32)
    acc = tl.zeros((G_POW2, D_PAD), tl.float32)
    for first in range(0, num_pieces, TILE):
        index = first + tl.arange(0, TILE)
        used = (index < num_pieces)[:, None] & (group < G)[None, :]
        partial = (first_piece + index)[:, None] * G + group[None, :]  # [TILE, G]
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
    tl.store(out_ptr + group[:, None] * D + dim[None, :], out, mask=mask)


_counters: dict[torch.device, torch.Tensor] = {}


def arrival_counters(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` zeros. They outlive every graph that was captured with them, and each use leaves zeros behind.

    Steps on one stream share them. (Two streams of one device must not run this kernel side by side; no engine does.)
    """
    if device not in _counters or len(_counters[device]) < count:
        _counters[device] = torch.zeros(max(count, NUM_COUNTERS), dtype=torch.int32, device=device)
    return _counters[device]


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _config(row_bytes: int) -> tuple[int, int, int]:
    """(tokens per tile, num_stages, num_warps); row_bytes is what one padded key takes.

    num_stages - 1 tiles are on their way at a time. No configuration takes more than 75 KB of shared memory, so that a
    multiprocessor of an H200 holds PROGRAMS_AT_ONCE programs, and every GPU since Ampere at least one.
    """
    if row_bytes > 512:  # float32 with head_dim above 128
        return (16, 2, 4)
    if row_bytes > 256:  # float32, or head_dim above 128
        return (64, 2, 4)
    return (64, 3, 2)


def _grid(batch: int, num_kv_heads: int, max_context_len: int, num_multiprocessors: int) -> tuple[int, int]:
    """(programs, programs of one wave), both per KV head.

    One program for each sequence and a wave to cut long ones with; where few sequences may be very long, up to
    MAX_WAVES, so that what the last wave leaves idle is little. More would cost: a program without work takes 2 ns.
    """
    wave = max(PROGRAMS_AT_ONCE * num_multiprocessors // num_kv_heads, 1)
    long_pieces = batch + batch * max_context_len // LONG_PIECE
    return max(batch + wave, min(long_pieces, MAX_WAVES * wave)), wave


def plan_decode(
    context_lens: torch.Tensor, max_context_len: int, num_kv_heads: int, row_bytes: int, fused: bool
) -> torch.Tensor:
    """Which program takes which piece, for every layer of a step: [P, PLAN_FIELDS] int32, see `_plan_kernel`.

    context_lens [B] int32, as the attention will get them, none above the host's bound max_context_len; row_bytes as
    in `padded_row_bytes`.
    """
    batch, tile = len(context_lens), _config(row_bytes)[0]
    num_programs, wave = _grid(batch, num_kv_heads, max_context_len, _num_multiprocessors(context_lens.device))
    plan = torch.empty((num_programs, PLAN_FIELDS), dtype=torch.int32, device=context_lens.device)
    launch(
        _plan_kernel,
        (1,),
        plan,
        context_lens,
        batch,
        num_programs,
        wave,
        TILE=tile,
        FUSED=fused,
        MAX_SIZE=LONG_PIECE // tile,
        LENGTHS=LENGTHS_AT_ONCE,
        RIVALS=RIVALS_AT_ONCE,
        FIELDS=PLAN_FIELDS,
        num_warps=8,
        **pdl_options(context_lens.device),
    )
    return plan


def padded_row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one key, its dimensions rounded up to a power of two."""
    return max(16, triton.next_power_of_2(head_dim)) * dtype.itemsize


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
    context_lens [B] int32, all in the cache, none above max_context_len. Returns [B, Hq, D]; zeros at length 0."""
    assert q.stride()[1:] == (q.shape[2], 1)
    row_bytes = padded_row_bytes(q.shape[2], q.dtype)
    plan = plan_decode(context_lens, max_context_len, k_cache.shape[2], row_bytes, fused=False)
    return _launch(q, q.shape[1], k_cache, v_cache, block_tables, context_lens, plan, scale)


def fused_decode_attention(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    num_heads: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Norm (if weights [D] are given), RoPE, cache store and attention of one new token per sequence.

    qkv [B, (Hq + 2 * Hkv) * D] as projected; cos_sin [max_pos, D] float32, the D/2 cosines of a position and then its
    D/2 sines; caches and tables as in `decode_attention`. context_lens [B] count the new token, which stands at
    position context_len - 1 and is stored there; `plan` was made from them. Returns [B, Hq, D]; zeros at length 0, for
    which nothing is stored.
    """
    assert qkv.stride(1) == 1 and cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    assert (q_weight is None) == (k_weight is None), "norm weights come in pairs"
    rope = (cos_sin, q_weight, k_weight, eps)
    return _launch(qkv, num_heads, k_cache, v_cache, block_tables, context_lens, plan, scale, rope)


def _launch(
    q: torch.Tensor,
    num_heads: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
    rope: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, float] | None = None,
) -> torch.Tensor:
    batch = len(q)
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    assert block_tables.stride(1) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "a layer's cache is one contiguous slice"
    cos_sin, q_weight, k_weight, eps = rope or (None, None, None, 0.0)
    group = num_heads // num_kv_heads
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    tile, num_stages, num_warps = _config(padded_row_bytes(head_dim, q.dtype))
    out = torch.empty((batch, num_heads, head_dim), dtype=q.dtype, device=q.device)
    partial_out = torch.empty((num_kv_heads, len(plan), group, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((num_kv_heads, len(plan), group), dtype=torch.float32, device=q.device)
    launch(
        _decode_kernel,
        (num_kv_heads, len(plan)),
        out,
        partial_out,
        partial_lse,
        arrival_counters(q.device, batch * num_kv_heads),
        plan,
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        cos_sin,
        q_weight,
        k_weight,
        scale * LOG2_E,
        eps,
        q.stride(0),
        block_tables.stride(0),
        HKV=num_kv_heads,
        G=group,
        G_PAD=max(16, triton.next_power_of_2(group + (rope is not None))),  # 16: the least that tl.dot takes
        D=head_dim,
        D_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        TILE=tile,
        G_POW2=triton.next_power_of_2(group),
        COMBINE_TILE=max(COMBINE_ELEMENTS // (triton.next_power_of_2(group) * dim_pad), 1),
        PLAN_FIELDS=PLAN_FIELDS,
        FUSED=rope is not None,
        NORM=q_weight is not None,
        num_warps=num_warps,
        num_stages=num_stages,
        **pdl_options(q.device),
    )
    return out
