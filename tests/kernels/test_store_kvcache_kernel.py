"""store_kvcache: the right slots are written, and nothing else."""

from collections.abc import Callable

import pytest
import torch

from nanovllm.kernels.store_kvcache import store_kvcache


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 16), (3, 80), (1, 128)])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_writes_only_the_mapped_slots(
    num_kv_heads: int,
    head_dim: int,
    index_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    randn: Callable[..., torch.Tensor],
) -> None:
    size = num_kv_heads * head_dim
    qkv = randn(5, 4 * size, dtype=dtype)  # q, k and v packed: keys and values are strided views
    key = qkv[:, 2 * size : 3 * size].view(5, num_kv_heads, head_dim)
    value = qkv[:, 3 * size :].view(5, num_kv_heads, head_dim)
    slots = torch.tensor([17, -1, 0, 63, 31], dtype=index_dtype, device=device)
    k_cache, v_cache = (randn(4, 16, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    stored = slots >= 0
    expected_k.view(64, num_kv_heads, head_dim)[slots[stored].long()] = key[stored]
    expected_v.view(64, num_kv_heads, head_dim)[slots[stored].long()] = value[stored]

    store_kvcache(key, value, k_cache, v_cache, slots)

    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_padding_rows_store_nothing(device: torch.device, randn: Callable[..., torch.Tensor]) -> None:
    key = randn(3, 2, 16, dtype=torch.float32)
    cache = randn(2, 16, 2, 16, dtype=torch.float32)
    before = cache.clone()
    store_kvcache(key, key, cache, cache, torch.full((3,), -1, dtype=torch.int32, device=device))
    assert torch.equal(cache, before)
