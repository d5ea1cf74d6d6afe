"""Qwen3 dense models: pre-norm decoder with per-head RMSNorm on q and k before RoPE, and a SwiGLU MLP.

Built by the `ModelRunner` from a `ModelConfig`; parameter names follow the checkpoint, except that q, k, v and gate, up
are packed (`packed_modules_mapping`). The residual travels beside the hidden states, so that each addition is one
kernel with the norm that follows it. On several ranks the hidden states between two layers are parts of a sum, which
the next norm's kernel sums up.
"""

import torch
from torch import nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention, take_rows
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.fused import gated_linear, reduce_norm
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.context import get_context
from nanovllm.utils.dist import SINGLE, Group


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            group=group,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            group=group,
            reduce_results=False,
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attn = Attention(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, config.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        rotary: RotaryEmbedding,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, hidden] -> this rank's part of [T, hidden], or of the given rows [S] of it."""
        qkv = self.qkv_proj(hidden_states)
        return self.o_proj(self.attn(qkv, positions, rotary, self.q_norm, self.k_norm, rows))


class Qwen3MLP(nn.Module):
    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, [config.intermediate_size] * 2, group=group)
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, group=group, reduce_results=False
        )
        self.act_fn = SiluAndMul()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> this rank's part of [T, hidden]."""
        return self.down_proj(gated_linear(self.gate_up_proj, self.act_fn, hidden_states))


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.group = group
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config, group)

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        rotary: RotaryEmbedding,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (output of the MLP, residual); their sum is the layer's output. All [T, hidden].

        With `rows` [S] queries, and what comes behind attention, are those of these rows only; the results [S, hidden].
        """
        hidden_states, residual = reduce_norm(self.group, self.input_layernorm, hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, positions, rotary, rows)
        residual = take_rows(residual, rows)
        hidden_states, residual = reduce_norm(self.group, self.post_attention_layernorm, hidden_states, residual)
        return self.mlp(hidden_states), residual


class Qwen3Model(nn.Module):
    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.group = group
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, group) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = get_rope(config.head_dim, config.max_position_embeddings, config.rope_theta)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T] ids, [T] positions -> [S, hidden] of the rows that the context names.

        In prefill these are each sequence's last ones. The others are there for their keys and values alone, the last
        of which are those of the last layer.
        """
        hidden_states, residual = self.embed_tokens(input_ids), None
        *layers, last_layer = self.layers
        for layer in layers:
            hidden_states, residual = layer(hidden_states, residual, positions, self.rotary_emb)
        rows = get_context().logits_indices
        hidden_states, residual = last_layer(hidden_states, residual, positions, self.rotary_emb, rows)
        hidden_states, _ = reduce_norm(self.group, self.norm, hidden_states, residual)
        return hidden_states


class Qwen3ForCausalLM(nn.Module):
    """Decoder and head; `forward` gives hidden states of the rows that the context names, `compute_logits` projects."""

    packed_modules_mapping = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: ModelConfig, group: Group = SINGLE) -> None:
        super().__init__()
        self.model = Qwen3Model(config, group)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T] ids, [T] positions -> hidden states [S, hidden]; which S rows, the context says."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[S, hidden] -> [S, vocab] on rank 0, None elsewhere."""
        return self.lm_head(hidden_states)
