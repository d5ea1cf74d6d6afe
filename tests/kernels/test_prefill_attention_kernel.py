"""prefill_attention against a softmax in float64: packed and paged keys, with and without a prefix."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
import triton
import triton.language as tl

from nanovllm.kernels import prefill_attention as module
from nanovllm.kernels.prefill_attention import prefill_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # absolute, of outputs of about 1


def cu_seqlens(lens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One sequence: q [q_len, Hq, D], k and v [k_len, Hkv, D]; the last query sees every key."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def page(
    sequences: list[torch.Tensor], block_size: int, order: list[int], block_tables: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache, block_tables) that hold the sequences [k_len, Hkv, D]; unused slots are NaN, unused entries -1."""
    cache = torch.full((len(order), block_size, *sequences[0].shape[1:]), float("nan")).to(sequences[0])
    if block_tables is None:
        free = iter(order)
        width = max(-(-len(sequence) // block_size) for sequence in sequences)
        block_tables = torch.full((len(sequences), width), -1, dtype=torch.int32)
        for row, sequence in enumerate(sequences):
            for index in range(-(-len(sequence) // block_size)):
                block_tables[row, index] = next(free)
    for row, sequence in enumerate(sequences):
        for index, tokens in enumerate(sequence.split(block_size)):
            cache[block_tables[row, index], : len(tokens)] = tokens
    return cache, block_tables


@pytest.fixture
def tma(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles of keys by tensor descriptors: the interpreter has them, and GPUs since Hopper."""
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the GPU has no TMA")

    def can_use_tma(q: torch.Tensor, tile_n: int, block_size: int) -> bool:
        return block_size % tile_n == 0

    monkeypatch.setattr(module, "_can_use_tma", can_use_tma)


SHAPES = [(8, 1, 16), (4, 2, 64), (3, 1, 80), (1, 1, 128)]  # num_heads, num_kv_heads, head_dim


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_packed_keys(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    randn: Callable[..., torch.Tensor],
) -> None:
    lens = [1, 40, 17]
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    qkv = randn(sum(lens), sum(sizes), dtype=dtype)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in qkv.split(sizes, dim=1))
    scale = head_dim**-0.5
    cu = cu_seqlens(lens, device)
    out = prefill_attention(q, k, v, cu, cu, max(lens), scale)
    assert out.dtype == dtype and out.is_contiguous()
    parts = zip(q.split(lens), k.split(lens), v.split(lens), strict=True)
    expected = torch.cat([reference(*part, scale) for part in parts])
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(*shape, block_size) for shape, block_size in zip(SHAPES, [16, 256, 48, 32], strict=True)],
)
def test_paged_keys_with_a_prefix(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    randn: Callable[..., torch.Tensor],
) -> None:
    q_lens, k_lens = [1, 20, 33], [75, 20, 97]  # a prefix of 74, none, and one of 64
    q = randn(sum(q_lens), num_heads, head_dim, dtype=dtype)
    keys, values = ([randn(length, num_kv_heads, head_dim, dtype=dtype) for length in k_lens] for _ in range(2))
    num_blocks = sum(-(-length // block_size) for length in k_lens) + 1
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    k_cache, block_tables = page(keys, block_size, order, None)
    v_cache, _ = page(values, block_size, order, block_tables)
    scale = head_dim**-0.5
    out = prefill_attention(
        q,
        k_cache,
        v_cache,
        cu_seqlens(q_lens, device),
        cu_seqlens(k_lens, device),
        max(q_lens),
        scale,
        block_tables.to(device),
    )
    parts = zip(q.split(q_lens), keys, values, strict=True)
    expected = torch.cat([reference(*part, scale) for part in parts])
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_several_tiles_of_queries(dtype: torch.dtype, device: torch.device, randn: Callable[..., torch.Tensor]) -> None:
    """Lengths around the tile sizes, and enough queries for the large tiles of 16-bit dtypes."""
    lens = [128, 129, 63, 1]
    q, k, v = (randn(sum(lens), 1, 16, dtype=dtype) for _ in range(3))
    cu = cu_seqlens(lens, device)
    out = prefill_attention(q, k, v, cu, cu, max(lens), 0.25)
    parts = zip(q.split(lens), k.split(lens), v.split(lens), strict=True)
    expected = torch.cat([reference(*part, 0.25) for part in parts])
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("tma")
def test_whole_tiles_by_tma(device: torch.device, randn: Callable[..., torch.Tensor]) -> None:
    test_paged_keys_with_a_prefix(4, 2, 64, 256, torch.float16, device, randn)
    test_several_tiles_of_queries(torch.float16, device, randn)


@pytest.mark.usefixtures("tma")
def test_one_loop_over_large_tiles_of_the_cache(
    device: torch.device, randn: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes and lengths on, before and behind the edges of tiles; the cache is NaN past the keys."""
    monkeypatch.setattr(module, "_tile_config", lambda *_: (128, 128, 8, 2))
    q_lens, k_lens, block_size = [1, 128, 129, 255, 130, 40], [128, 128, 129, 511, 386, 250], 256
    q = randn(sum(q_lens), 2, 16, dtype=torch.float16)
    keys, values = ([randn(length, 1, 16, dtype=torch.float16) for length in k_lens] for _ in range(2))
    order = list(range(sum(-(-length // block_size) for length in k_lens)))[::-1]
    k_cache, block_tables = page(keys, block_size, order, None)
    v_cache, _ = page(values, block_size, order, block_tables)
    out = prefill_attention(
        q, k_cache, v_cache, cu_seqlens(q_lens, device), cu_seqlens(k_lens, device), 255, 0.25, block_tables.to(device)
    )
    parts = zip(q.split(q_lens), keys, values, strict=True)
    expected = torch.cat([reference(*part, 0.25) for part in parts])
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=TOLERANCE[torch.float16])


@triton.jit
def find_all_tiles_kernel(seq_ptr, tile_ptr, cu_seqlens_ptr, num_seqs, TILE_M: tl.constexpr):
    program = tl.program_id(0)
    seq, tile = module._find_tile(cu_seqlens_ptr, num_seqs, program, TILE_M)
    tl.store(seq_ptr + program, seq)
    tl.store(tile_ptr + program, tile)


def test_programs_find_every_tile_of_every_sequence(device: torch.device) -> None:
    """132 sequences: a program reads 128 lengths at a time."""
    lens = [1, 31, 32, 33, 65, 1] * 22
    num_programs = sum(lens) // 32 + len(lens)
    seqs, tiles = (torch.empty(num_programs, dtype=torch.int32, device=device) for _ in range(2))
    find_all_tiles_kernel[(num_programs,)](seqs, tiles, cu_seqlens(lens, device), len(lens), TILE_M=32)
    found = list(zip(seqs.tolist(), tiles.tolist(), strict=True))
    assert len(set(found)) == num_programs
    assert {(seq, tile) for seq, length in enumerate(lens) for tile in range(-(-length // 32))} <= set(found)
    assert all(tile >= 0 for _, tile in found)


@pytest.mark.parametrize("dtype_name", ["float16", "float32"])
@pytest.mark.parametrize("max_seqlen_q", [1, 64, 65, 16384])
@pytest.mark.parametrize("dim_pad", [16, 64, 128, 256])
def test_tiles_fit_into_shared_memory(dtype_name: str, max_seqlen_q: int, dim_pad: int) -> None:
    """Queries, and num_stages tiles of keys and of values: at most 227 KB on Hopper, 99 KB on the smallest GPUs."""
    dtype = getattr(torch, dtype_name)
    for is_large, limit in ((True, 227 << 10), (False, 99 << 10)):
        tile_m, tile_n, _, num_stages = module._tile_config(max_seqlen_q, dim_pad, dtype, is_large)
        assert (tile_m + 2 * num_stages * tile_n) * dim_pad * dtype.itemsize <= limit
