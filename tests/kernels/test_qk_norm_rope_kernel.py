"""qk_norm_rope_store against norm, rotation and store done one after another in PyTorch."""

from collections.abc import Callable

import pytest
import torch

from nanovllm.kernels.qk_norm_rope import qk_norm_rope_store

EPS = 1e-6
MAX_POSITION = 50
TOLERANCE = {
    torch.float32: {"rtol": 3e-6, "atol": 3e-6},
    torch.float16: {"rtol": 3e-3, "atol": 3e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def make_cos_sin(head_dim: int, device: torch.device) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(MAX_POSITION).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float().to(device)


def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        return x
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], cos_sin [T, D]."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 80), (1, 1, 64), (9, 3, 32), (16, 8, 128)]
)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("has_cache", [True, False])
def test_equals_the_separate_operations(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norm: bool,
    has_cache: bool,
    dtype: torch.dtype,
    device: torch.device,
    randn: Callable[..., torch.Tensor],
) -> None:
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    wide = randn(3, q_size + 2 * kv_size + 32, dtype=dtype)  # a strided qkv, whose neighbours must not change
    qkv = wide[:, 16:-16]
    before = wide.clone()
    index_dtype = torch.int64 if has_cache else torch.int32
    positions = torch.tensor([MAX_POSITION - 1, 0, 7], dtype=index_dtype, device=device)
    cos_sin = make_cos_sin(head_dim, device)
    q_weight, k_weight = (randn(head_dim, dtype=dtype) if has_norm else None for _ in range(2))
    k_cache, v_cache = (randn(3, 16, num_kv_heads, head_dim, dtype=dtype) if has_cache else None for _ in range(2))
    slots = torch.tensor([33, -1, 5], dtype=torch.int32, device=device) if has_cache else None
    caches_before = [cache.clone() for cache in (k_cache, v_cache)] if has_cache else []

    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in qkv.clone().split([q_size, kv_size, kv_size], dim=1))
    expected_q = rotate(norm(q, q_weight), cos_sin[positions.long()])
    expected_k = rotate(norm(k, k_weight), cos_sin[positions.long()])

    qk_norm_rope_store(
        qkv,
        positions,
        cos_sin,
        q_weight,
        k_weight,
        EPS,
        num_heads,
        num_kv_heads,
        head_dim,
        k_cache,
        v_cache,
        slots,
    )

    new_q, new_k, new_v = (part.unflatten(1, (-1, head_dim)) for part in qkv.split([q_size, kv_size, kv_size], dim=1))
    torch.testing.assert_close(new_q, expected_q, **TOLERANCE[dtype])
    torch.testing.assert_close(new_k, expected_k, **TOLERANCE[dtype])
    assert torch.equal(new_v, v)
    assert torch.equal(wide[:, :16], before[:, :16]) and torch.equal(wide[:, -16:], before[:, -16:])
    if has_cache:
        for cache, cache_before, stored in zip((k_cache, v_cache), caches_before, (new_k, new_v), strict=True):
            expected = cache_before.flatten(0, 1)
            expected[33], expected[5] = stored[0], stored[2]
            assert torch.equal(cache.flatten(0, 1), expected)
