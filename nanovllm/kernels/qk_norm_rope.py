"""What happens between the qkv projection and attention, in one kernel: norm and rotate q and k, store k and v.

Four small operations (q norm, k norm, RoPE, cache store) read and write the same few kilobytes per token; in one kernel
a decode layer saves their latencies, and prefill their traffic. A program handles a few neighbouring heads of one
token: query heads, or KV heads together with the values that belong to them.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs

MAX_HEADS_PER_PROGRAM = 8


# Scalars of a token: where they lie makes no difference, and must not make another compiled kernel.
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"])
def _qk_norm_rope_store_kernel(
    qkv_ptr,  # [T, (Hq + 2 * Hkv) * D]: q heads, k heads, v heads
    positions_ptr,  # [T]
    cos_sin_ptr,  # [max_pos, D] float32: D / 2 cosines, then D / 2 sines
    q_weight_ptr,  # [D], None without NORM
    k_weight_ptr,  # [D], None without NORM
    k_cache_ptr,  # [slots, Hkv, D], None without STORE
    v_cache_ptr,  # [slots, Hkv, D], None without STORE
    slot_mapping_ptr,  # [T], None without STORE
    qkv_stride,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HALF_PAD: tl.constexpr,  # D / 2 rounded up to a power of two
    HEADS: tl.constexpr,  # heads per program
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    HALF: tl.constexpr = D // 2
    NUM_Q_PROGRAMS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    is_query = program < NUM_Q_PROGRAMS
    dim = tl.arange(0, HALF_PAD)
    dim_mask = dim < HALF
    row_ptr = qkv_ptr + token * qkv_stride

    head = tl.where(is_query, program, program - NUM_Q_PROGRAMS) * HEADS + tl.arange(0, HEADS)
    mask = (head < tl.where(is_query, HQ, HKV))[:, None] & dim_mask[None, :]
    column = (tl.where(is_query, 0, HQ) + head)[:, None] * D + dim[None, :]
    low = tl.load(row_ptr + column, mask=mask, other=0.0)
    high = tl.load(row_ptr + column + HALF, mask=mask, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)

    if NORM:  # rounds as rms_norm.py does
        inverse_rms = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / D + eps)[:, None]
        weight_ptr = q_weight_ptr if is_query else k_weight_ptr
        low_weight = tl.load(weight_ptr + dim, mask=dim_mask, other=0.0).to(tl.float32)[None, :]
        high_weight = tl.load(weight_ptr + dim + HALF, mask=dim_mask, other=0.0).to(tl.float32)[None, :]
        low = ((low * inverse_rms).to(dtype).to(tl.float32) * low_weight).to(dtype).to(tl.float32)
        high = ((high * inverse_rms).to(dtype).to(tl.float32) * high_weight).to(dtype).to(tl.float32)

    # Rotation of the pairs (d, d + D / 2), in float32 whatever the dtype.
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * D + dim
    cos = tl.load(angle_ptr, mask=dim_mask, other=0.0)[None, :]
    sin = tl.load(angle_ptr + HALF, mask=dim_mask, other=0.0)[None, :]
    rotated_low = (low * cos - high * sin).to(dtype)
    rotated_high = (high * cos + low * sin).to(dtype)
    tl.store(row_ptr + column, rotated_low, mask=mask)
    tl.store(row_ptr + column + HALF, rotated_high, mask=mask)

    if STORE and not is_query:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if slot >= 0:
            cell = slot * (HKV * D) + head[:, None] * D + dim[None, :]
            tl.store(k_cache_ptr + cell, rotated_low, mask=mask)
            tl.store(k_cache_ptr + cell + HALF, rotated_high, mask=mask)
            value_ptr = row_ptr + HKV * D + column
            tl.store(v_cache_ptr + cell, tl.load(value_ptr, mask=mask), mask=mask)
            tl.store(v_cache_ptr + cell + HALF, tl.load(value_ptr + HALF, mask=mask), mask=mask)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
) -> None:
    """Normalise (if weights are given) and rotate q and k in place, and store k and v (if caches are given).

    qkv [T, (Hq + 2 * Hkv) * D] with contiguous rows; positions [T]; cos_sin [max_pos, D] float32, the D/2 cosines of a
    position and then its D/2 sines; weights [D]; caches [blocks, bs, Hkv, D], contiguous; slot_mapping [T], -1 stores
    nothing. RoPE pairs dimension d with d + D/2.
    """
    assert (q_weight is None) == (k_weight is None), "norm weights come in pairs"
    assert qkv.stride(1) == 1 and cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    assert k_cache is None or (k_cache.is_contiguous() and v_cache.is_contiguous())
    heads = min(MAX_HEADS_PER_PROGRAM, triton.next_power_of_2(max(num_heads, num_kv_heads)))
    half_pad = triton.next_power_of_2(head_dim // 2)
    num_programs = triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)
    launch(
        _qk_norm_rope_store_kernel,
        (qkv.shape[0], num_programs),
        qkv,
        positions,
        cos_sin,
        q_weight,
        k_weight,
        k_cache,
        v_cache,
        slot_mapping,
        qkv.stride(0),
        eps,
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        HALF_PAD=half_pad,
        HEADS=heads,
        NORM=q_weight is not None,
        STORE=k_cache is not None,
        num_warps=min(max(heads * half_pad // 128, 1), 4),
        **pdl_options(qkv.device),
    )
