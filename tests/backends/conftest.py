"""Builds paged caches and step metadata for the attention backend tests."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

from nanovllm.backends import BACKENDS, AttentionBackend, select_backends
from nanovllm.utils.context import Context

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def backend_for() -> Callable[..., AttentionBackend]:
    """`backend_for(name, dtype, num_heads, num_kv_heads, head_dim, block_size)`; skips where it is unavailable."""

    def make(name: str, *model: object) -> AttentionBackend:
        assert name in BACKENDS
        try:
            return select_backends(name, DEVICE, *model)[0]
        except ValueError as error:
            pytest.skip(str(error))

    return make


@dataclass
class PagedBatch:
    """Sequences with random keys and values, `keys[i]` and `values[i]` [k_len, Hkv, D], and a cache that holds them.

    Whatever no sequence owns is NaN: the rest of each last block, and a whole block that unused table entries name.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor

    def prefill_context(self, q_lens: list[int], k_lens: list[int] | None = None) -> Context:
        """Computes the last `q_lens` tokens of the first `k_lens` (default: all) out of the cache."""
        k_lens = k_lens or [len(keys) for keys in self.keys]
        return Context(
            is_prefill=True,
            block_tables=self.block_tables,
            cu_seqlens_q=cu_seqlens(q_lens),
            cu_seqlens_k=cu_seqlens(k_lens),
            max_seqlen_q=max(q_lens),
            max_seqlen_k=max(k_lens),
            query_lens=q_lens,
            key_lens=k_lens,
        )

    def decode_context(self, max_context_len: int | None = None) -> Context:
        lens = [len(keys) for keys in self.keys]
        return Context(
            block_tables=self.block_tables,
            context_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
            max_context_len=max_context_len or max(lens),
        )


def cu_seqlens(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=DEVICE)


@pytest.fixture
def paged_batch() -> Callable[..., PagedBatch]:
    """`paged_batch(lens, block_size, num_kv_heads, head_dim, dtype)`."""

    def make(lens: list[int], block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedBatch:
        generator = torch.Generator().manual_seed(sum(lens) + block_size)
        shape = (num_kv_heads, head_dim)
        blocks_of = [-(-length // block_size) for length in lens]
        *order, nan_block = torch.randperm(sum(blocks_of) + 1, generator=generator).tolist()
        width = max(*blocks_of, 1) + 1
        free = iter(order)
        tables = [[next(free) for _ in range(num)] for num in blocks_of]
        block_tables = [table + [nan_block] * (width - len(table)) for table in tables]
        sequences, caches = [], []
        for _ in range(2):
            tokens = [torch.randn(length, *shape, generator=generator).to(DEVICE, dtype) for length in lens]
            cache = torch.full((len(order) + 1, block_size, *shape), float("nan"), dtype=dtype, device=DEVICE)
            for table, sequence in zip(tables, tokens, strict=True):
                for block, part in zip(table, sequence.split(block_size), strict=False):
                    cache[block, : len(part)] = part
            sequences.append(tokens)
            caches.append(cache)
        return PagedBatch(*sequences, *caches, torch.tensor(block_tables, dtype=torch.int32, device=DEVICE))

    return make
