"""Token embedding and output head, both split over the vocabulary.

Each rank holds `ceil(vocab / ranks)` rows; the last ranks' surplus rows are padding that no token id reaches and whose
logits are cut off.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import check_total, copy_into, linear
from nanovllm.utils.dist import SINGLE, Group


class VocabParallelEmbedding(nn.Module):
    """Rows of the ids that fall to this rank; the others' ids give zeros, and the sum over ranks is the embedding."""

    def __init__(self, vocab_size: int, hidden_size: int, group: Group = SINGLE) -> None:
        super().__init__()
        self.group = group
        self.vocab_size = vocab_size
        self.shard_size = -(-vocab_size // group.size)
        self.start = group.rank * self.shard_size
        self.weight = nn.Parameter(torch.empty(self.shard_size, hidden_size), requires_grad=False)
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param: nn.Parameter, source: Any) -> None:
        check_total(source, dim=0, total=self.vocab_size)
        stop = min(self.start + self.shard_size, self.vocab_size)
        size = max(stop - self.start, 0)
        if size:
            copy_into(param.data[:size], source[self.start : stop])
        param.data[size:].zero_()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden]."""
        if self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.start
        is_mine = (local >= 0) & (local < self.shard_size)
        embedded = F.embedding(local * is_mine, self.weight) * is_mine.unsqueeze(1)
        return self.group.all_reduce(embedded)


class ParallelLMHead(VocabParallelEmbedding):
    """The output projection; shares its weight with the embedding when the model ties them."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[S, hidden] -> logits [S, vocab] on rank 0, None elsewhere."""
        if hidden_states.is_cuda:  # where the library streams so large a matrix at the speed of the memory
            logits = F.linear(hidden_states, self.weight)
        else:
            logits = linear(hidden_states, self.weight, None).contiguous()
        if self.group.size == 1:
            return logits
        parts = self.group.gather(logits)
        return torch.cat(parts, dim=-1)[:, : self.vocab_size] if parts is not None else None
