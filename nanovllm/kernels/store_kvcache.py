"""Writes the keys and values of a step into the paged cache, for models whose attention does not use `qk_norm_rope`."""

import torch
import triton
import triton.language as tl


@triton.jit
def _store_kvcache_kernel(
    key_ptr,  # [T, Hkv, D]
    value_ptr,  # [T, Hkv, D]
    k_cache_ptr,  # [slots, Hkv, D]
    v_cache_ptr,  # [slots, Hkv, D]
    slot_mapping_ptr,  # [T]
    key_stride,
    value_stride,
    SIZE: tl.constexpr,  # Hkv * D
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        offsets = tl.arange(0, BLOCK)
        mask = offsets < SIZE
        key = tl.load(key_ptr + token * key_stride + offsets, mask=mask)
        value = tl.load(value_ptr + token * value_stride + offsets, mask=mask)
        tl.store(k_cache_ptr + slot * SIZE + offsets, key, mask=mask)
        tl.store(v_cache_ptr + slot * SIZE + offsets, value, mask=mask)


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Copy key and value [T, Hkv, D] (tokens may be strided) into the slots of slot_mapping [T]; -1 stores nothing.

    The caches are [blocks, bs, Hkv, D], contiguous; slot = block * bs + offset in the block.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    for tensor in (key, value):
        assert tensor.stride()[1:] == (head_dim, 1), (
            f"a token's heads must be contiguous, got strides {tensor.stride()}"
        )
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "a layer's cache is one contiguous slice"
    size = num_kv_heads * head_dim
    block = triton.next_power_of_2(size)
    _store_kvcache_kernel[(num_tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 8),
    )
