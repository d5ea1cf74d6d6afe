"""Sampling through the engine: the right distribution, and noise that depends on nothing but the request's seed."""

import random
from collections import Counter

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers.sampler import Sampler
from tests.recording import engine
from tests.reference import decisive_tokens, load_reference_model, random_prompt

MAX_TOKENS = 20


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model(std=0.3)


def sample(
    llm: LLM, prompts: list[list[int]], temperature: float = 1.0, max_tokens: int = MAX_TOKENS
) -> list[list[int]]:
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


# ---- Distribution


def assert_frequencies(token_ids: list[int], probabilities: torch.Tensor) -> None:
    """Pearson's chi-square test at the 0.1 % level; tokens expected fewer than 5 times count as one."""
    counts = Counter(token_ids)
    expected = (probabilities * len(token_ids)).tolist()
    rare = [i for i, n in enumerate(expected) if n < 5]
    cells = [(counts[i], n) for i, n in enumerate(expected) if n >= 5]
    cells += [(sum(counts[i] for i in rare), sum(expected[i] for i in rare))] if rare else []
    assert len(cells) >= 10, "the distribution is too narrow to test anything"
    statistic = sum((seen - n) ** 2 / n for seen, n in cells if n > 0)
    free = len(cells) - 1
    # Wilson and Hilferty's approximation of the 99.9 % quantile.
    limit = free * (1 - 2 / (9 * free) + 3.09 * (2 / (9 * free)) ** 0.5) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} exceeds {limit:.1f} with {free} degrees of freedom"


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("varied", ["seeds", "positions"])
def test_the_sampler_draws_from_the_softmax(temperature, varied):
    logits = torch.randn(24, generator=torch.Generator().manual_seed(0))
    n = 20_000
    constant, all_of_them = torch.full((n,), 12345), torch.arange(n) + 2**40
    seeds, positions = (all_of_them, constant) if varied == "seeds" else (constant, all_of_them - 2**40)
    ids = Sampler()(logits.expand(n, -1), torch.full((n,), temperature), seeds, positions)
    assert_frequencies(ids.tolist(), (logits / temperature).softmax(-1))


@pytest.mark.parametrize("temperature", [0.6, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_engine_draws_from_the_models_softmax(tiny_model, temperature):
    """The first token behind the prompt, and the second one behind the most frequent first."""
    path = tiny_model(vocab_size=32, num_hidden_layers=1, std=0.12)
    prompt, n = random_prompt(3, 32), 6000
    with engine(path, seed=0) as (llm, _):
        pairs = sample(llm, [prompt] * n, temperature, max_tokens=2)

    def probabilities(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return (load_reference_model(path)(torch.tensor([ids])).logits[0, -1] / temperature).softmax(-1)

    assert_frequencies([first for first, _ in pairs], probabilities(prompt))
    ((most, _),) = Counter(first for first, _ in pairs).most_common(1)
    assert_frequencies([second for first, second in pairs if first == most], probabilities([*prompt, most]))


def test_a_tiny_temperature_is_nearly_greedy(path):
    prompt = random_prompt(30)
    with engine(path) as (llm, _):
        assert sample(llm, [prompt] * 3, temperature=1e-5) == [decisive_tokens(path, prompt, MAX_TOKENS)] * 3


def test_greedy_and_sampled_rows_mix_in_one_batch(path):
    prompts = [random_prompt(length) for length in (5, 30, 40)]
    expected = [decisive_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]
    cold, hot = (SamplingParams(temperature=t, max_tokens=MAX_TOKENS) for t in (0, 1.0))
    with engine(path, seed=1) as (llm, log):
        outputs = llm.generate([p for p in prompts for _ in range(2)], [cold, hot] * 3, use_tqdm=False)
        assert log.most_rows == 6
    assert [output["token_ids"] for output in outputs[::2]] == expected
    assert all(output["token_ids"] != ids for output, ids in zip(outputs[1::2], expected, strict=True))


# ---- Seeds


def test_a_seed_makes_an_engine_repeatable(path):
    prompts = [random_prompt(10)] * 4
    runs = {}
    for name, seed in {"7": 7, "7 again": 7, "8": 8, "none": None, "none again": None}.items():
        with engine(path, seed=seed) as (llm, _):
            runs[name] = [sample(llm, prompts), sample(llm, prompts)]
    assert runs["7"] == runs["7 again"]
    # Each request draws its own noise: in one call, in the next one, with another seed, and without any.
    rows = [tuple(ids) for name in ("7", "8", "none", "none again") for call in runs[name] for ids in call]
    assert len(set(rows)) == len(rows)


class FixedSeeds:
    """Stands in for the engine's generator of request seeds."""

    def __init__(self, seeds: list[int]) -> None:
        self.seeds = iter(seeds)

    def getrandbits(self, _: int) -> int:
        return next(self.seeds)


PROMPTS = [random_prompt(length) for length in (5, 255, 256, 300, 513)]
SEEDS = [random.Random(i).getrandbits(63) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def alone(path):
    """What each prompt samples with its seed, alone in an engine."""
    completions = []
    for prompt, seed in zip(PROMPTS, SEEDS, strict=True):
        with engine(path, overlap=False, enable_prefix_caching=False) as (llm, _):
            llm._seeds = FixedSeeds([seed])
            completions += sample(llm, [prompt])
    assert all(len(set(ids)) > MAX_TOKENS // 2 for ids in completions)
    return completions


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": False},
        {"max_num_batched_tokens": 100},
        {"num_kvcache_blocks": 4},
        {"num_kvcache_blocks": 34, "kvcache_block_size": 16, "max_num_seqs": 3},
    ],
    ids=["batch", "batch without overlap", "chunks", "preempted", "preempted in small blocks"],
)
def test_noise_depends_on_the_seed_alone(path, alone, settings):
    with engine(path, **settings) as (llm, log):
        for call in ("cold", "warm"):
            log.clear()
            llm._seeds = FixedSeeds(SEEDS)
            assert sample(llm, PROMPTS) == alone, call
        assert any(log.first_hits) or "num_kvcache_blocks" in settings  # a small pool has recycled them
        assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in settings)
        assert (log.most_chunks > 1) == ("max_num_batched_tokens" in settings)


def test_noise_depends_on_the_seed(path, alone):
    """The counter-test: other seeds for the same requests give other tokens."""
    with engine(path) as (llm, _):
        llm._seeds = FixedSeeds([seed + 1 for seed in SEEDS])
        others = sample(llm, PROMPTS)
    assert all(a != b for a, b in zip(others, alone, strict=True))
