"""The backend of the flash-attn package (version 2 API), an optional install: `pip install nanovllm[flash]`.

The package is imported on first use only, and a broken binary must not break the engine: whatever its import or a tiny
probe call raises becomes the reason why the backend is unavailable. Shapes as in `nanovllm.backends.base`.
"""

from functools import cache
from types import ModuleType

import torch

from nanovllm.backends.base import AttentionBackend
from nanovllm.utils.context import Context


class FlashAttnBackend(AttentionBackend):
    """`flash_attn_varlen_func` for prefill, `flash_attn_with_kvcache` for decode."""

    name = "flash_attn"

    @classmethod
    def unavailable_reason(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> str | None:
        if device.type != "cuda":
            return f"it needs a CUDA device, not {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it computes in float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
        if block_size % 256:
            return f"kvcache_block_size={block_size} is not a multiple of 256"
        try:
            _flash_attn()
        except Exception as error:  # a binary built for another torch raises OSError or worse, not only ImportError
            return f"importing flash_attn failed: {_one_line(error)}"
        return _probe(device, dtype, num_heads, num_kv_heads, head_dim, block_size)

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor | None,
        v_cache: torch.Tensor | None,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        if context.block_tables is not None:
            k, v = k_cache, v_cache
        return _flash_attn().flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=context.cu_seqlens_q,
            cu_seqlens_k=context.cu_seqlens_k,
            max_seqlen_q=max(context.max_seqlen_q, 2),  # at 1 it takes it that every sequence has a query
            max_seqlen_k=context.max_seqlen_k,
            softmax_scale=scale,
            causal=True,  # aligned to the last key since flash-attn 2.1
            block_table=context.block_tables,
        )

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        return (
            _flash_attn()
            .flash_attn_with_kvcache(
                q[:, None],
                k_cache,
                v_cache,
                cache_seqlens=context.context_lens,
                block_table=context.block_tables,
                softmax_scale=scale,
                causal=True,
            )
            .squeeze(1)
        )


def _flash_attn() -> ModuleType:
    import flash_attn

    return flash_attn


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@cache
def _probe(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> str | None:
    """Run both functions once on one token: a build may lack this GPU, this dtype or this head_dim."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, k = zeros(1, num_heads, head_dim), zeros(1, num_kv_heads, head_dim)
    cache_shape = (1, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = zeros(*cache_shape), zeros(*cache_shape)
    cu_seqlens = ints(0, 1)
    context = Context(
        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=1, max_seqlen_k=1, context_lens=ints(1)
    )
    backend = FlashAttnBackend()
    try:
        backend.prefill(q, k, k, None, None, context, 1.0)
        context.block_tables = ints(0)[None]
        backend.prefill(q, k, k, k_cache, v_cache, context, 1.0)
        backend.decode(q, k_cache, v_cache, context, 1.0)
        torch.cuda.synchronize(device)
    except Exception as error:
        return f"a trial call failed: {_one_line(error)}"
    return None
