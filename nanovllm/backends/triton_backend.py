"""The backend of our own Triton kernels: needs nothing beyond Triton, which a CUDA build of PyTorch brings along.

The kernels are in `nanovllm.kernels.prefill_attention` and `nanovllm.kernels.decode_attention`, imported on first use.
Shapes as in `nanovllm.backends.base`.
"""

import importlib.util
import os

import torch

from nanovllm.backends.base import AttentionBackend
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context


class TritonBackend(AttentionBackend):
    """Flash attention for prefill; for decode paged attention, fused with what precedes it when the device is a GPU."""

    name = "triton"
    fuses_decode = True

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
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # how the tests run kernels on a CPU
        if device.type != "cuda" and not interpreted:
            return f"it needs a CUDA device, not {device.type}"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if not interpreted and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
        if block_size % 16:
            return f"kvcache_block_size={block_size} is not a multiple of 16"
        if head_dim > 256:
            return f"head_dim={head_dim} is larger than 256"
        return None

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
        from nanovllm.kernels.prefill_attention import prefill_attention

        if context.block_tables is not None:
            k, v = k_cache, v_cache
        return prefill_attention(
            q,
            k,
            v,
            context.cu_seqlens_q,
            context.cu_seqlens_k,
            context.max_seqlen_q,
            scale,
            context.block_tables,
        )

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        from nanovllm.kernels.decode_attention import decode_attention

        return decode_attention(
            q, k_cache, v_cache, context.block_tables, context.context_lens, context.max_context_len, scale
        )

    def plan_decode(
        self, context: Context, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        if not context.context_lens.is_cuda:  # where `fused_decode` is not used
            return None
        from nanovllm.kernels.decode_attention import padded_row_bytes, plan_decode

        row_bytes = padded_row_bytes(head_dim, dtype)
        return plan_decode(context.context_lens, context.max_context_len, num_kv_heads, row_bytes, fused=True)

    def fused_decode(
        self,
        qkv: torch.Tensor,
        rotary_emb: RotaryEmbedding,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        num_heads: int,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        from nanovllm.kernels.decode_attention import fused_decode_attention

        return fused_decode_attention(
            qkv,
            rotary_emb.cos_sin,
            q_norm.weight if q_norm else None,
            k_norm.weight if k_norm else None,
            q_norm.eps if q_norm else 0.0,
            num_heads,
            k_cache,
            v_cache,
            context.block_tables,
            context.context_lens,
            context.decode_plan,
            scale,
        )
