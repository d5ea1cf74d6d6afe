"""Penalties and log probabilities against plain Python and transformers."""

import math
from collections import Counter

import pytest
import torch

from nanovllm.layers.logits import add_biases, apply_penalties, raw_logprobs

V = 12


def reference_penalties(
    logits: list[float], tokens: tuple[list[int], list[int]], penalties: tuple[float, float, float]
) -> list[float]:
    """`tokens`: prompt and completion; `penalties`: repetition, presence, frequency."""
    (prompt, completion), (rep, pres, freq) = tokens, penalties
    counts = Counter(completion)
    out = []
    for i, x in enumerate(logits):
        if i in prompt or i in completion:
            x = x / rep if x > 0 else x * rep
        out.append(x - freq * counts[i] - pres * (counts[i] > 0))
    return out


def test_penalties_equal_the_plain_definition():
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = -math.inf
    tokens = [([3, 3, 5], [7, 7, 7, 1]), ([0], []), ([11, 2], [2]), ([4, 4, 4, 4], [4, 0, 4])]
    penalties = [(1.3, 0.5, 0.25), (1.3, 2.0, 2.0), (0.7, -1.0, -0.5), (1.0, 0.0, 0.0)]
    history = torch.full((4, 9), 6, dtype=torch.int32)  # what stands past the length must not count
    for row, (prompt, completion) in enumerate(tokens):
        history[row, : len(prompt + completion)] = torch.tensor(prompt + completion)
    expected = [reference_penalties(x, t, p) for x, t, p in zip(logits.tolist(), tokens, penalties, strict=True)]
    lengths = torch.tensor([len(p + c) for p, c in tokens])
    prompt_lengths = torch.tensor([len(p) for p, _ in tokens])
    apply_penalties(logits, history, lengths, prompt_lengths, *torch.tensor(penalties).T)
    torch.testing.assert_close(logits, torch.tensor(expected))


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_the_repetition_penalty_is_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, V, generator=generator)
    history = torch.randint(V, (3, 6), generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits.clone())
    six, off = torch.full((3,), 6), torch.zeros(3)
    apply_penalties(logits, history.int(), six, six - 2, torch.full((3,), penalty), off, off)
    assert torch.equal(logits, expected)


def test_biases_touch_their_cells_alone():
    logits = torch.zeros(2, 3)
    add_biases(logits, torch.tensor([1, 5]), torch.tensor([2.5, -math.inf]))
    assert logits.tolist() == [[0, 2.5, 0], [0, 0, -math.inf]]


def test_raw_logprobs_are_the_log_softmax_with_ranks_by_logit_then_id():
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    logits[1] = 0.0  # all equal
    logits[2, 5] = -math.inf
    logits[3, :2] = torch.tensor([0.0, -0.0])
    token_ids = torch.tensor([7, 4, 5, 1])
    raw = raw_logprobs(logits, token_ids, 3)
    expected = logits.log_softmax(dim=-1)
    torch.testing.assert_close(raw.logprobs, expected[torch.arange(4), token_ids])
    torch.testing.assert_close(raw.top_logprobs, expected.gather(1, raw.top_ids))
    for row in range(4):
        order = sorted(range(V), key=lambda i: (-logits[row, i].item(), i))  # noqa: B023
        assert raw.top_ids[row].tolist() == order[:3]
        assert raw.ranks[row] == 1 + order.index(int(token_ids[row]))


def test_more_alternatives_than_tokens_give_all_tokens():
    raw = raw_logprobs(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), 5)
    assert raw.top_ids.tolist() == [[1, 0]] and raw.ranks.tolist() == [2]
    assert raw_logprobs(torch.zeros(1, 2), torch.tensor([1]), 0).top_ids.shape == (1, 0)
