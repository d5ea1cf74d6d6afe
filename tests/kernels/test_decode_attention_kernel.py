"""decode_attention against a softmax in float64; cache and scratch memory are NaN wherever nothing was stored."""

from collections.abc import Callable

import pytest
import torch

from nanovllm.kernels import decode_attention as module
from nanovllm.kernels.decode_attention import decode_attention, fused_decode_attention
from nanovllm.kernels.qk_norm_rope import qk_norm_rope_store

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
) -> None:
    caches = paged_cache(lens, block_size, num_kv_heads, head_dim, dtype, device)
    qkv = randn(len(lens), (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q = qkv[:, : num_heads * head_dim].view(len(lens), num_heads, head_dim)
    scale = head_dim**-0.5
    context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    out = decode_attention(q, *caches, context_lens, max(lens), scale)
    assert out.dtype == dtype and out.is_contiguous()
    expected = reference(q, *caches, lens, scale)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])
    for row, length in enumerate(lens):
        assert length or not out[row].any()
    assert not module.arrival_counters(device, 1).any(), "every use must leave the counters at zero"


@pytest.fixture(params=[1, 40])
def num_extra(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Programs beyond one per sequence, also of a wave: sequences in one piece, and pieces of one tile."""
    monkeypatch.setattr(module, "_grid", lambda batch, *_: (batch + request.param, request.param))
    return request.param


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


@pytest.mark.usefixtures("num_extra")
def test_lengths_around_tiles_and_blocks(
    dtype: torch.dtype, device: torch.device, randn: Callable[..., torch.Tensor]
) -> None:
    check([0, 1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 0], 2, 1, 16, 16, dtype, device, randn)


@pytest.mark.usefixtures("num_extra")
@pytest.mark.parametrize("lens", [[0], [1], [64 * 17 + 1], [1, 500], [500, 1, 1, 1], [0, 0, 320, 0]])
def test_pieces_of_few_and_of_many_tiles(
    lens: list[int], device: torch.device, randn: Callable[..., torch.Tensor]
) -> None:
    check(lens, 2, 1, 16, 256, torch.float32, device, randn)


def test_more_sequences_than_are_looked_at_in_one_go(
    device: torch.device, randn: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LENGTHS_AT_ONCE", 4)
    check([5, 130, 0, 64, 1, 65, 200, 3, 16, 90, 7], 2, 2, 16, 16, torch.float32, device, randn)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2)])
def test_many_pieces_are_combined_a_few_at_a_time(
    num_heads: int,
    num_kv_heads: int,
    device: torch.device,
    randn: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMBINE_ELEMENTS", 4 * 4 * 16)  # four pieces or more at a time
    monkeypatch.setattr(module, "_grid", lambda *_: (32, 30))
    check([64 * 17 + 1, 65, 64 * 4], num_heads, num_kv_heads, 16, 256, torch.float32, device, randn)


def test_large_scores_do_not_overflow(device: torch.device, randn: Callable[..., torch.Tensor]) -> None:
    k_cache, v_cache, block_tables = paged_cache([130], 16, 1, 16, torch.float32, device)
    q = randn(1, 1, 16, dtype=torch.float32) * 1e4
    context_lens = torch.tensor([130], dtype=torch.int32, device=device)
    out = decode_attention(q, k_cache, v_cache, block_tables, context_lens, 130, 1.0)
    torch.testing.assert_close(
        out.double().cpu(), reference(q, k_cache, v_cache, block_tables, [130], 1.0), rtol=0, atol=1e-2
    )


@pytest.mark.usefixtures("num_extra")
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "norm"),
    [(2, 2, 16, 16, True), (4, 2, 64, 256, False), (3, 1, 80, 48, True), (16, 1, 16, 32, True)],
)
def test_fused_equals_norm_rope_and_store_followed_by_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    norm: bool,
    device: torch.device,
    randn: Callable[..., torch.Tensor],
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lens = [70, 1, 0, 65, 64]  # the new token counted; its own slot in the cache is NaN before
    k_cache, v_cache, block_tables = paged_cache(
        [n + (n > 0) for n in lens], block_size, num_kv_heads, head_dim, dtype, device
    )
    lens = [n + (n > 0) for n in lens]
    slots = torch.tensor(
        [int(block_tables[i, (n - 1) // block_size]) * block_size + (n - 1) % block_size if n else -1
         for i, n in enumerate(lens)],
        dtype=torch.int32, device=device,
    )  # fmt: skip
    for cache in (k_cache, v_cache):
        cache.flatten(0, 1)[slots[slots >= 0].long()] = float("nan")
    qkv = randn(len(lens), (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    weights = [randn(head_dim, dtype=dtype) if norm else None for _ in range(2)]
    angles = randn(200, head_dim // 2, dtype=torch.float32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    scale = head_dim**-0.5

    expected_caches = k_cache.clone(), v_cache.clone()
    prepared = qkv.clone()
    positions = (context_lens - 1).clamp(min=0).long()
    heads = (num_heads, num_kv_heads, head_dim)
    qk_norm_rope_store(prepared, positions, cos_sin, *weights, 1e-6, *heads, *expected_caches, slots)
    q = prepared[:, : num_heads * head_dim].view(len(lens), num_heads, head_dim)
    expected = decode_attention(q, *expected_caches, block_tables, context_lens, max(lens), scale)

    plan = module.plan_decode(
        context_lens, max(lens), num_kv_heads, module.padded_row_bytes(head_dim, dtype), fused=True
    )
    out = fused_decode_attention(
        qkv, cos_sin, *weights, 1e-6, num_heads, k_cache, v_cache, block_tables, context_lens, plan, scale
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[dtype])
    tolerance = dict(rtol=0, atol=TOLERANCE[dtype], equal_nan=True)
    torch.testing.assert_close(k_cache, expected_caches[0], **tolerance)
    torch.testing.assert_close(v_cache, expected_caches[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("num_programs", "wave", "long", "size"),
    [
        (16, 5, 1024, 5),  # one wave of whole sequences
        (16, 7, 1024, 2),  # one wave
        (16, 6, 1024, 3),
        (16, 6, 128, 2),  # one wave would be too long
        (16, 4, 64, 1),  # too many sequences for one wave
        (6, 1, 64, 10),  # as short as the grid allows: one program more than sequences
    ],
)
def test_a_plan_covers_every_tile_once(
    num_programs: int, wave: int, long: int, size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_grid", lambda *_: (num_programs, wave))
    monkeypatch.setattr(module, "LONG_PIECE", long)
    monkeypatch.setattr(module, "LENGTHS_AT_ONCE", 4)
    monkeypatch.setattr(module, "RIVALS_AT_ONCE", 2)
    lens, tiles = [300, 0, 65, 66, 1], [5, 1, 1, 2, 1]
    context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    plan = module.plan_decode(context_lens, 300, 1, 64, fused=True).tolist()
    pieces = [-(-n // size) for n in tiles]
    expected = [[seq, index, pieces[seq], size, sum(pieces[:seq])] for seq in range(5) for index in range(pieces[seq])]
    length = {(seq, index): min(size, tiles[seq] - index * size) for seq, index, *_ in expected}
    expected.sort(key=lambda entry: (-length[entry[0], entry[1]], entry))  # the longest first
    assert plan[: len(expected)] == expected
    assert all(entry[0] == -1 for entry in plan[len(expected) :])
