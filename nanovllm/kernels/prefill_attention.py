"""Causal attention of many query tokens per sequence, flash-attention style; called by the triton backend for prefill.

The sequences of a step are packed one after another (`cu_seqlens_q` [B + 1]: where each one's queries begin). A program
computes one tile of TILE_M queries of one sequence for one query head: it walks over the keys in tiles of TILE_N and
keeps a running maximum, sum of exponentials and weighted sum of values, so that the scores never leave the chip.

The last query of a sequence sees all of its keys. With q_len queries and k_len keys, query i sees key j when
j <= i + k_len - q_len, so a tile of queries splits the keys into three runs:

    keys 0 .. full          seen by every query of the tile: computed without a mask
    keys full .. end        around the diagonal, seen by some: computed with a mask
    keys end .. k_len       seen by none: skipped

Keys are packed like the queries, or in the paged cache (PAGED). Shapes as in `nanovllm.backends.base`.

With TMA keys and values come through Hopper's bulk copy engine: one thread asks for a tile, where otherwise all of them
compute addresses. What lies past the keys must not reach the result, not even as a NaN, so that the end of the second
run keeps to plain loads, which can be masked. Large tiles out of the cache have one loop for both runs up to there.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.launch import launch
from nanovllm.kernels.paging import load_blocks, token_slots
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs

LOG2_E = 1.4426950408889634


@triton.jit
def _find_tile(cu_seqlens_ptr, num_seqs, program, TILE_M: tl.constexpr):
    """(sequence, tile within it) of a program; the tile may lie past the sequence's end.

    Sequence i owns the programs from cu_seqlens[i] // TILE_M + i on: at least as many as it has tiles. All sequences
    together own T // TILE_M + B, which the host knows without looking at the lengths.
    """
    seq = -1
    for first in range(0, num_seqs, 128):
        index = first + tl.arange(0, 128)
        begin = tl.load(cu_seqlens_ptr + index, mask=index < num_seqs, other=0) // TILE_M + index
        seq += tl.sum(((begin <= program) & (index < num_seqs)).to(tl.int32), axis=0)
    return seq, program - (tl.load(cu_seqlens_ptr + seq) // TILE_M + seq)


@triton.jit
def _attend(
    acc,  # [TILE_M, D_PAD] weighted sum of values
    denominator,  # [TILE_M] sum of weights
    max_score,  # [TILE_M]
    q,  # [TILE_M, D_PAD]
    last_key,  # [TILE_M] the last key that each query sees
    k_ptr,  # of this sequence and KV head (of the whole cache and KV head if PAGED)
    v_ptr,
    k_stride,
    v_stride,
    k_desc,  # descriptors of the same two, [rows, Hkv * D], read in whole tiles; None without TMA
    v_desc,
    first_row,  # of the sequence in them; not used if PAGED
    column,
    block_table_ptr,
    scale_log2,
    begin,
    end,
    diagonal,  # where the second run begins; DIAGONAL only
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    MASKED: tl.constexpr,
    DIAGONAL: tl.constexpr,
    TMA: tl.constexpr,
):
    """Take the keys begin .. end into the running softmax.

    Without MASKED these are whole tiles; every query sees all of them or, with DIAGONAL, of those before `diagonal`.
    """
    dim = tl.arange(0, D_PAD)[None, :]
    offsets = tl.arange(0, TILE_N)
    if PAGED:
        next_blocks = load_blocks(block_table_ptr, begin, end, TILE_N, BLOCK_SIZE)
    for start in range(begin, end, TILE_N):
        if PAGED:
            blocks = next_blocks
            next_blocks = load_blocks(block_table_ptr, start + TILE_N, end, TILE_N, BLOCK_SIZE)
        if TMA:
            row = blocks * BLOCK_SIZE + start % BLOCK_SIZE if PAGED else first_row + start
            k = k_desc.load([row, column])
            v = v_desc.load([row, column])
        else:
            rows = token_slots(blocks, start, TILE_N, BLOCK_SIZE) if PAGED else (start + offsets).to(tl.int64)
            mask = dim < D
            if MASKED:
                mask = mask & (start + offsets < end)[:, None]
            k = tl.load(k_ptr + rows[:, None] * k_stride + dim, mask=mask, other=0.0)
            v = tl.load(v_ptr + rows[:, None] * v_stride + dim, mask=mask, other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if MASKED:
            scores = tl.where((start + offsets)[None, :] <= last_key[:, None], scores, float("-inf"))
        if DIAGONAL:  # noqa: SIM102 (a branch of the compiler, around one of the GPU)
            if start >= diagonal:
                scores = tl.where((start + offsets)[None, :] <= last_key[:, None], scores, float("-inf"))
        # Scaled only now, so that scaling and subtracting are one instruction. Finite: every query sees key 0.
        new_max = tl.maximum(max_score, tl.max(scores, axis=1) * scale_log2)
        shrink = tl.exp2(max_score - new_max)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        denominator = denominator * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        max_score = new_max
    return acc, denominator, max_score


@triton.jit(do_not_specialize=["num_seqs", "block_table_stride"])
def _prefill_kernel(
    out_ptr,  # [T, Hq, D]
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [T, Hkv, D], or [slots, Hkv, D] if PAGED
    v_ptr,
    k_desc,  # tensor descriptors of k and v as [rows, Hkv * D]; None without TMA
    v_desc,
    cu_seqlens_q_ptr,  # [B + 1]
    cu_seqlens_k_ptr,  # [B + 1]
    block_tables_ptr,  # [B, W], None unless PAGED
    scale_log2,  # scale * log2(e): exponentials are powers of two here
    q_stride,
    k_stride,
    v_stride,
    block_table_stride,
    num_seqs,
    G: tl.constexpr,  # query heads per KV head
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TMA: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    head = tl.program_id(1)
    seq, tile = _find_tile(cu_seqlens_q_ptr, num_seqs, tl.program_id(0), TILE_M)
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    k_start = tl.load(cu_seqlens_k_ptr + seq)
    k_len = tl.load(cu_seqlens_k_ptr + seq + 1) - k_start
    tile = tl.cdiv(q_len, TILE_M) - 1 - tile  # the last tile of a sequence has the most keys: start it first
    if tile < 0:
        return
    first_query = tile * TILE_M

    query = first_query + tl.arange(0, TILE_M)
    dim = tl.arange(0, D_PAD)[None, :]
    mask = (query < q_len)[:, None] & (dim < D)
    row = (q_start + query).to(tl.int64)[:, None]
    q = tl.load(q_ptr + row * q_stride + head * D + dim, mask=mask, other=0.0)

    prefix = k_len - q_len
    full = (prefix + first_query + 1) // TILE_N * TILE_N
    end = tl.minimum(prefix + first_query + TILE_M, k_len)
    kv_offset = (head // G) * D
    k_base, v_base, table_ptr = k_ptr + kv_offset, v_ptr + kv_offset, block_tables_ptr
    if PAGED:
        table_ptr += seq.to(tl.int64) * block_table_stride
    else:
        k_base += k_start.to(tl.int64) * k_stride
        v_base += k_start.to(tl.int64) * v_stride

    acc = tl.zeros((TILE_M, D_PAD), tl.float32)
    denominator = tl.zeros((TILE_M,), tl.float32)
    max_score = tl.full((TILE_M,), float("-inf"), tl.float32)
    last_key = prefix + query
    middle = full
    if ONE_LOOP:
        middle = tl.maximum(tl.minimum(tl.cdiv(end, TILE_N), k_len // TILE_N) * TILE_N, full)
    acc, denominator, max_score = _attend(
        acc, denominator, max_score, q, last_key, k_base, v_base, k_stride, v_stride, k_desc, v_desc, k_start,
        kv_offset, table_ptr, scale_log2, 0, middle, full, D, D_PAD, TILE_N, BLOCK_SIZE, PAGED, MASKED=False,
        DIAGONAL=ONE_LOOP, TMA=TMA,
    )  # fmt: skip
    acc, denominator, max_score = _attend(
        acc, denominator, max_score, q, last_key, k_base, v_base, k_stride, v_stride, k_desc, v_desc, k_start,
        kv_offset, table_ptr, scale_log2, middle, end, full, D, D_PAD, TILE_N, BLOCK_SIZE, PAGED, MASKED=True,
        DIAGONAL=False, TMA=False,
    )  # fmt: skip
    out_rows = row * (tl.num_programs(1) * D) + head * D
    tl.store(out_ptr + out_rows + dim, acc / denominator[:, None], mask=mask)


@cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """Data-centre Hopper and Blackwell: 227 KB of shared memory a program; the smallest GPUs have 99."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _can_use_tma(q: torch.Tensor, tile_n: int, block_size: int) -> bool:
    """Where it was measured to help, and where a tile is a box of the tensor."""
    is_measured = _has_large_shared_memory(q.device) and q.element_size() == 2 and q.shape[2] in (64, 128)
    return is_measured and block_size % tile_n == 0


def _tile_config(
    max_seqlen_q: int, dim_pad: int, dtype: torch.dtype, has_large_shared_memory: bool
) -> tuple[int, int, int, int]:
    """(TILE_M, TILE_N, num_warps, num_stages). 8 warps are two of Hopper's warp groups, 64 rows of TILE_M each."""
    if dtype == torch.float32:  # no tensor cores: larger tiles would not fit into the registers
        return (32, 32, 4, 1) if dim_pad <= 64 else (32, 16, 8, 1)
    if has_large_shared_memory and dim_pad <= 128:
        # Measured on one H200 at head_dim 128: small tiles waste less around the diagonal of short prompts.
        return (64, 64, 4, 3) if max_seqlen_q < 8192 else (128, 128, 8, 3)
    if max_seqlen_q <= 64:  # chunk tails, and prompts of which the prefix cache leaves little
        return (64, 64, 4, 2) if dim_pad <= 128 else (64, 32, 4, 2)
    return (128, 64, 8, 2) if has_large_shared_memory or dim_pad <= 128 else (64, 32, 4, 2)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    block_tables: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, Hq, D]; k and v [T, Hkv, D], or the caches [blocks, bs, Hkv, D] when block_tables [B, W] int32 is given.

    A token's heads must be contiguous; tokens may be strided, as in views of packed qkv. cu_seqlens [B + 1] int32.
    Returns [T, Hq, D].
    """
    num_tokens, num_heads, head_dim = q.shape
    paged = block_tables is not None
    block_size = k.shape[1] if paged else 0
    if paged:
        assert k.is_contiguous() and v.is_contiguous(), "a layer's cache is one contiguous slice"
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    for tensor in (q, k, v):
        assert tensor.stride()[1:] == (head_dim, 1), (
            f"a token's heads must be contiguous, got strides {tensor.stride()}"
        )
    num_seqs = cu_seqlens_q.shape[0] - 1
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    tile_m, tile_n, num_warps, num_stages = _tile_config(
        max_seqlen_q, dim_pad, q.dtype, _has_large_shared_memory(q.device)
    )
    k_desc = v_desc = None
    if _can_use_tma(q, tile_n, block_size if paged else tile_n):
        k_desc, v_desc = (
            TensorDescriptor(t, [len(t), t.shape[1] * head_dim], [t.stride(0), 1], [tile_n, head_dim]) for t in (k, v)
        )
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    launch(
        _prefill_kernel,
        (num_tokens // tile_m + num_seqs, num_heads),
        out,
        q,
        k,
        v,
        k_desc,
        v_desc,
        cu_seqlens_q,
        cu_seqlens_k,
        block_tables,
        scale * LOG2_E,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        block_tables.stride(0) if paged else 0,
        num_seqs,
        G=num_heads // k.shape[1],
        D=head_dim,
        D_PAD=dim_pad,
        TILE_M=tile_m,
        TILE_N=tile_n,
        BLOCK_SIZE=block_size,
        PAGED=paged,
        TMA=k_desc is not None,
        # Measured on one H200: 3 to 12 % faster for large tiles of the cache, slower for packed ones.
        ONE_LOOP=k_desc is not None and paged and tile_m == 128,
        num_warps=num_warps,
        num_stages=num_stages,
        **pdl_options(q.device),
    )
    return out
