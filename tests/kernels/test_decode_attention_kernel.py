"""decode_attention against a softmax in float64; cache and scratch memory are NaN wherever nothing was stored."""

from collections.abc import Callable

import pytest
import torch

from nanovllm.kernels import decode_attention as module
from nanovllm.kernels.decode_attention import decode_attention, plan_splits

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # absolute, of outputs of about 1


def paged_cache(
    lens: list[int], block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k_cache, v_cache, block_tables) of random blocks in random order; unused slots are NaN, unused entries -1."""
    generator = torch.Generator().manual_seed(sum(lens))
    blocks_of = [-(-length // block_size) for length in lens]
    num_blocks = sum(blocks_of) + 1
    order = torch.randperm(num_blocks, generator=generator).tolist()
    block_tables = torch.full((len(lens), max(*blocks_of, 1) + 1), -1, dtype=torch.int32)
    k_cache, v_cache = (torch.full((num_blocks, block_size, num_kv_heads, head_dim), float("nan")) for _ in range(2))
    for row, (length, num) in enumerate(zip(lens, blocks_of, strict=True)):
        block_tables[row, :num] = torch.tensor([order.pop() for _ in range(num)])
        for cache in (k_cache, v_cache):
            for index in range(num):
                stored = min(block_size, length - index * block_size)
                values = torch.randn(stored, num_kv_heads, head_dim, generator=generator)
                cache[block_tables[row, index], :stored] = values
    return k_cache.to(device, dtype), v_cache.to(device, dtype), block_tables.to(device)


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lens: list[int],
    scale: float,
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[2]
    for row, length in enumerate(lens):
        blocks = block_tables[row, : -(-length // k_cache.shape[1])].long()
        k, v = (cache[blocks].flatten(0, 1)[:length].double().cpu() for cache in (k_cache, v_cache))
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        weights = torch.einsum("hd,nhd->hn", q[row].double().cpu(), k).mul(scale).softmax(dim=-1)
        out[row] = torch.einsum("hn,nhd->hd", weights, v) if length else 0.0
    return out


def check(
    lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    randn: Callable[..., torch.Tensor],
    max_context_len: int | None = None,
) -> None:
    caches = paged_cache(lens, block_size, num_kv_heads, head_dim, dtype, device)
    qkv = randn(len(lens), (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q = qkv[:, : num_heads * head_dim].view(len(lens), num_heads, head_dim)
    scale = head_dim**-0.5
    context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    out = decode_attention(q, *caches, context_lens, max_context_len or max(lens), scale)
    assert out.dtype == dtype and out.is_contiguous()
    expected = reference(q, *caches, lens, scale)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])
    for row, length in enumerate(lens):
        assert length or not out[row].any()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(2, 2, 16, 16), (4, 2, 64, 256), (3, 1, 80, 48), (8, 1, 128, 32), (20, 1, 32, 16), (2, 1, 256, 16)],
)
def test_groups_head_dims_and_block_sizes(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    randn: Callable[..., torch.Tensor],
) -> None:
    check([70, 1, 0, 16], num_heads, num_kv_heads, head_dim, block_size, dtype, device, randn)


@pytest.mark.parametrize("max_context_len", [257, 1000])
def test_lengths_around_blocks_and_a_loose_bound(
    max_context_len: int, dtype: torch.dtype, device: torch.device, randn: Callable[..., torch.Tensor]
) -> None:
    lens = [0, 1, 15, 16, 17, 255, 256, 257]
    check(lens, 2, 1, 16, 16, dtype, device, randn, max_context_len)


def test_one_split_writes_the_result_itself(device: torch.device, randn: Callable[..., torch.Tensor]) -> None:
    assert plan_splits(3, 1, 64) == (64, 1)
    check([64, 0, 63], 2, 1, 16, 16, torch.float32, device, randn)


def test_splits_grow_when_there_are_not_enough_of_them(
    device: torch.device, randn: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SPLITS", 2)
    assert plan_splits(4, 1, 300) == (64, 2)
    check([300, 129, 128, 5], 2, 1, 16, 16, torch.float32, device, randn)  # splits of 192, 128, 64 and 64 tokens


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2)])
def test_many_splits_are_combined_a_few_at_a_time(
    num_heads: int,
    num_kv_heads: int,
    device: torch.device,
    randn: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMBINE_ELEMENTS", 4 * 4 * 16)  # four splits or more at a time
    check([64 * 17 + 1, 65, 64 * 4], num_heads, num_kv_heads, 16, 256, torch.float32, device, randn)
    assert not module.arrival_counters(device, 1).any(), "every use must leave the counters at zero"


def test_large_scores_do_not_overflow(device: torch.device, randn: Callable[..., torch.Tensor]) -> None:
    k_cache, v_cache, block_tables = paged_cache([130], 16, 1, 16, torch.float32, device)
    q = randn(1, 1, 16, dtype=torch.float32) * 1e4
    out = decode_attention(
        q, k_cache, v_cache, block_tables, torch.tensor([130], dtype=torch.int32, device=device), 130, 1.0
    )
    torch.testing.assert_close(
        out.double().cpu(), reference(q, k_cache, v_cache, block_tables, [130], 1.0), rtol=0, atol=1e-2
    )


@pytest.mark.parametrize("num_kv_heads", [1, 8])
@pytest.mark.parametrize("batch", [1, 16, 64, 256, 512, 5000])
@pytest.mark.parametrize("max_context_len", [0, 1, 4096, 131072])
def test_the_grid_stays_bounded(batch: int, num_kv_heads: int, max_context_len: int) -> None:
    tokens, splits = plan_splits(batch, num_kv_heads, max_context_len)
    assert tokens % 128 == 0 or tokens == 64
    assert 1 <= splits <= module.MAX_SPLITS
    assert splits == 1 or batch * num_kv_heads * splits <= module.MAX_PROGRAMS
    covered = tokens * splits >= max_context_len
    assert covered or splits == module.MAX_SPLITS or batch * num_kv_heads * (splits + 1) > module.MAX_PROGRAMS


def test_split_size_follows_the_batch() -> None:
    """Measured best on an H200, for 8 KV heads: 64 tokens alone, 1024 in a batch of 256."""
    assert [plan_splits(batch, 8, 4096)[0] for batch in (1, 16, 64, 256)] == [64, 128, 256, 1024]
