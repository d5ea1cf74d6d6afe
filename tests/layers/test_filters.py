"""The plain form of the filters against numpy, and what is drawn against what ought to be."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.layers.filters import FilterTables, filtered_sample, log_min_p, survivors
from nanovllm.layers.sampler import Sampler
from tests.filter_reference import reference_survivors

Filter = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, FilterTables]  # lines, rows, positions, tables


def rows_of(n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Rows:
    """`n` rows with one filter and seeds of their own, all of line 0."""
    floats = [torch.full((n,), x, dtype=torch.float32) for x in (temperature, top_p, log_min_p(min_p))]
    seeds, top_ks = torch.arange(n) * 2**34 + 9, torch.full((n,), top_k, dtype=torch.int32)
    tables = FilterTables(seeds, floats[0], top_ks, *floats[1:])
    return torch.zeros(n, dtype=torch.int64), torch.arange(n), torch.full((n,), 77), tables


def surviving(logits: list[float] | np.ndarray, *one: float) -> set[int]:
    _, rows, _, tables = rows_of(1, *one)
    kept = survivors(torch.tensor(np.array([logits], dtype=np.float32)), rows, tables)
    return set(kept[0].nonzero().flatten().tolist())


# Few distinct values, so that ties are the rule.
LOGITS = st.sampled_from([-30.0, -2.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.5, 8.0]) | st.floats(-9, 9, width=32)


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(LOGITS, min_size=1, max_size=40),
    temperature=st.sampled_from([0.1, 0.6, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.11, 0.77]),
)
def test_survivors_are_those_of_numpy(logits, temperature, top_k, top_p, min_p):
    certain, possible = reference_survivors(np.float32(logits), temperature, top_k, top_p, min_p)
    kept = surviving(logits, temperature, top_k, top_p, min_p)
    assert certain <= kept <= possible
    assert kept, "one token always survives"


def test_pitfall_10_the_token_that_crosses_top_p_is_kept():
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    assert surviving(logits, 1.0, 0, 0.6) == {3, 2}
    assert surviving(logits, 1.0, 0, 0.39) == {3}
    assert surviving(logits, 1.0, 0, 0.41) == {3, 2}
    assert surviving(logits, 1.0, 0, 0.95) == {3, 2, 1, 0}
    assert surviving(logits, 1.0, 0, 1e-9) == {3}, "one token always survives"
    assert surviving(logits, 1.0, 3, 0.7) == {3, 2}, "top_p counts what top_k has left: .4 + .3 of .9"
    assert surviving(logits, 1.0, 0, 1.0, 0.6) == {3, 2}


def test_pitfall_9_top_k_of_1_is_greedy_at_any_temperature_and_on_ties():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]])
    for temperature in (0.0, 0.5, 1.0, 100.0):
        assert set(filtered_sample(logits, *rows_of(50, temperature, top_k=1)).tolist()) == {1}


def test_exactly_k_survive_on_flat_logits_of_a_large_vocabulary():
    logits = np.zeros(151_936)
    assert surviving(logits, 1.0, 20) == set(range(20))
    assert surviving(logits, 1.0, 151_935) == set(range(151_935))
    certain, possible = reference_survivors(logits, top_p=0.95)
    kept = surviving(logits, 1.0, 0, 0.95)
    assert certain <= kept <= possible and len(possible) - len(certain) < 5


def test_a_filter_changes_no_noise():
    """The draw among the survivors is the best of the unfiltered scores."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    plain = rows_of(200)
    unfiltered = filtered_sample(logits, *plain)
    expected = Sampler.sample(logits.expand(200, -1), plain[3].temperatures, plain[3].seeds, plain[2])
    assert torch.equal(unfiltered, expected)
    kept = survivors(logits, *rows_of(1, top_k=10)[1::2])[0]
    filtered = filtered_sample(logits, *rows_of(200, top_k=10))
    agree = kept[unfiltered]
    assert 50 < agree.sum() < 200
    assert torch.equal(filtered[agree], unfiltered[agree]) and kept[filtered].all()


@pytest.mark.parametrize(
    "one",
    [(1.0, 12, 1.0, 0.0), (0.8, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1), (1.5, 15, 0.9, 0.02), (0.6, 20, 0.95, 0.0)],
    ids=["top_k", "top_p", "min_p", "all", "Qwen3's"],
)
def test_frequencies_are_the_softmax_over_the_survivors(one: Filter):
    """Pearson's chi-square test at the 0.1 % level."""
    logits = 1.2 * torch.randn(1, 24, generator=torch.Generator().manual_seed(0))
    n = 20_000
    counts = Counter(filtered_sample(logits, *rows_of(n, *one)).tolist())
    kept, _ = reference_survivors(logits[0].numpy(), *one)
    assert set(counts) <= kept and 4 <= len(kept) < 24
    weights = {i: math.exp(logits[0, i].item() / one[0]) for i in kept}
    expected = {i: n * w / sum(weights.values()) for i, w in weights.items()}
    assert min(expected.values()) >= 5
    statistic = sum((counts[i] - e) ** 2 / e for i, e in expected.items())
    free = len(kept) - 1
    limit = free * (1 - 2 / (9 * free) + 3.09 * (2 / (9 * free)) ** 0.5) ** 3  # Wilson and Hilferty
    assert statistic < limit
