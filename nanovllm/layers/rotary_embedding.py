"""Rotary position embedding (Su et al., 2021), in the half-rotated form of the Llama family."""

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """Rotates the pairs (i, i + head_dim / 2) of each head by position * theta ** (-2 i / head_dim)."""

    def __init__(self, head_dim: int, max_position: int, theta: float) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd; rotary embeddings turn pairs and need an even head_dim")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), 1.0 / theta**exponents)
        # [max_position, head_dim], float32 whatever the model's dtype: cos in the first half, sin in the second.
        self.register_buffer("cos_sin", torch.cat((angles.cos(), angles.sin()), dim=-1), persistent=False)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x: [T, heads, head_dim], positions: [T] -> the rotated heads, in x's dtype."""
        return self.rotate(x, *self.at(positions))

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `rotate` takes, the same for all layers of a step: cos and signed sin [T, 1, head_dim], float32."""
        cos, sin = self.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Each pair turned: (x1, x2) * cos + (x2, x1) * (-sin, sin)."""
        is_float32, half = x.dtype is torch.float32, x.shape[-1] // 2
        x32 = x if is_float32 else x.float()
        out = x32 * cos
        out.narrow(-1, 0, half).addcmul_(x32.narrow(-1, half, half), sin.narrow(-1, 0, half))
        out.narrow(-1, half, half).addcmul_(x32.narrow(-1, 0, half), sin.narrow(-1, half, half))
        return out if is_float32 else out.to(x.dtype)


def get_rope(head_dim: int, max_position: int, theta: float) -> RotaryEmbedding:
    """The rotary embedding of a model; its layers share one."""
    return RotaryEmbedding(head_dim, max_position, theta)
