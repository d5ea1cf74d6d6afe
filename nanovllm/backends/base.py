"""The interface between the attention layers and whatever computes attention over the paged KV cache.

`ModelRunner` picks one backend for prefill and one for decode at start (`select_backends`); every `Attention` layer
then calls them with the metadata of the step. Keys and values are in the cache before `prefill` or `decode` is called.

Shapes. T: tokens computed in the step; B: sequences; W: block-table width; Hq, Hkv: query and KV heads of this rank
(Hq a multiple of Hkv); D: head_dim; bs: block size. Token j of a sequence lives in the cache at block
`block_tables[row, j // bs]`, offset `j % bs`.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context


class AttentionBackend(ABC):
    """Causal attention over a paged cache. Stateless: everything about a step is in its `Context`."""

    name: ClassVar[str]
    # Whether decode never waits for the device and takes its launch shape from `context.max_context_len` alone.
    supports_cuda_graph: ClassVar[bool] = True
    # Whether it has `fused_decode`, which a GPU then uses in place of norm, RoPE, cache store and `decode`.
    fuses_decode: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def unavailable_reason(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> str | None:
        """None when this backend can run such a model on this device, else one clause that says why it cannot."""

    @abstractmethod
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
        """Attention of several query tokens per sequence, causal and aligned to the end of the keys.

        q [T, Hq, D]; k, v [T, Hkv, D], all three possibly strided views of one packed tensor; caches
        [blocks, bs, Hkv, D]. Returns [T, Hq, D], contiguous. Without `context.block_tables` the keys are exactly k and
        v and the caches are not touched (they may be None); with it, all keys are read from the cache. In the last
        layer q has one token of each sequence that samples and none of the others, whose query length is 0.
        """

    @abstractmethod
    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        """Attention of one query token per sequence over the `context.context_lens` tokens that it has in the cache.

        q [B, Hq, D]; caches [blocks, bs, Hkv, D]. Returns [B, Hq, D], contiguous; a row of length 0 (padding of a CUDA
        graph) comes back as zeros. What the cache holds past a length never reaches the result, not even as a NaN.
        """

    def plan_decode(
        self, context: Context, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> object:
        """What decode wants to know of a step once for all layers, if anything; see `Context.decode_plan`.

        Called before the model, so that it is complete when the first layer runs.
        """
        return None

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
        """`decode`, and all that precedes it, from the packed projection qkv [B, (Hq + 2 * Hkv) * D].

        A sequence's new token is the last of its `context.context_lens`; its K and V are stored on the way.
        """
        raise NotImplementedError
