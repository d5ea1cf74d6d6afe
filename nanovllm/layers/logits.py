"""What happens to logits before a token is drawn from them, and what is reported of them: biases, penalties, log
probabilities. Called by `engine.extras` with a few rows at a time, in float32.
"""

import math
from typing import NamedTuple

import torch


def add_biases(logits: torch.Tensor, cells: torch.Tensor, biases: torch.Tensor) -> None:
    """Add in place: logits [N, V], contiguous; cells [C] int64, distinct, are row * V + token id; biases [C]."""
    logits.view(-1).index_add_(0, cells, biases)


def apply_penalties(
    logits: torch.Tensor,
    history: torch.Tensor,
    lengths: torch.Tensor,
    prompt_lengths: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Make tokens that have occurred less likely, in place, as vLLM does.

    A token of the prompt or the completion has its logit divided by `repetition` if positive, else multiplied (Keskar
    et al., CTRL, 2019); one of the completion then loses `presence`, and `frequency` for each time that it occurs.

    Args:
        logits: [N, V].
        history: [N, L], the tokens of each row; anything past its length.
        lengths, prompt_lengths: [N], tokens of the row, at least 1, and those of them that are its prompt.
        repetition, presence, frequency: [N] float32.
    """
    place = torch.arange(history.shape[1], device=logits.device)
    is_real = place < lengths.unsqueeze(1)
    is_completion = is_real & (place >= prompt_lengths.unsqueeze(1))
    ids = torch.where(is_real, history, history[:, :1]).long()
    # Only tokens of the history change, so only they are looked up. A repeated token is written repeatedly, each time
    # the same: all is computed from the old logits.
    counts = torch.zeros_like(logits).scatter_add_(1, ids, is_completion.float()).gather(1, ids)
    values = logits.gather(1, ids)
    repetition, presence, frequency = (x.unsqueeze(1) for x in (repetition, presence, frequency))
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits.scatter_(1, ids, values - frequency * counts - presence * (counts > 0))


class RawLogprobs(NamedTuple):
    """Log probabilities of N tokens and of the K likeliest beside each. Ranks order by logit, then by id."""

    token_ids: torch.Tensor  # [N] int64
    logprobs: torch.Tensor  # [N] float32
    ranks: torch.Tensor  # [N] int64, from 1
    top_ids: torch.Tensor  # [N, K] int64, in order
    top_logprobs: torch.Tensor  # [N, K] float32


def raw_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> RawLogprobs:
    """Log softmax of `logits` [N, V] float32 at `token_ids` [N] and at the `num_top` largest."""
    logits = logits.masked_fill(logits.isnan(), -math.inf) + 0.0  # -0 becomes 0
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, token_ids.unsqueeze(1))
    vocab_size = logits.shape[1]
    ids = torch.arange(vocab_size, device=logits.device)
    ranks = 1 + ((logits > own) | ((logits == own) & (ids < token_ids.unsqueeze(1)))).sum(dim=-1)
    # Integers that order like (logit, -id): an order without ties, so that topk has no choice.
    bits = logits.view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32 + (vocab_size - 1 - ids)
    best = keys.topk(min(num_top, vocab_size), dim=-1).values
    top_ids = vocab_size - 1 - (best & 0xFFFFFFFF)
    top_logprobs = logits.gather(1, top_ids) - total
    return RawLogprobs(token_ids, (own - total).squeeze(1), ranks, top_ids, top_logprobs)
