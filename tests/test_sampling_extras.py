"""Filters, penalties, biases, bans and log probabilities through the engine, whatever path a request takes."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence
from tests.recording import CLEAR, Recording, engine
from tests.reference import decisive_tokens, load_reference_model, random_prompt

MAX_TOKENS = 20


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model(std=0.3)


def run(llm: LLM, log: Recording, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sequence]:
    """Generate, and return the sequences themselves."""
    log.clear()
    llm.generate(prompts, params, use_tqdm=False)
    return list(log.seqs)


def tokens(seqs: list[Sequence]) -> list[list[int]]:
    return [seq.completion_token_ids for seq in seqs]


def reference_logits(path: str, ids: list[int]) -> torch.Tensor:
    """transformers' logits [len(ids), vocab]."""
    with torch.inference_mode():
        return load_reference_model(path)(torch.tensor([ids])).logits[0]


# ---- one request, many paths

KINDS: list[dict[str, Any]] = [
    {"top_k": 10},
    {"top_p": 0.7, "temperature": 1.3},
    {"min_p": 0.05, "top_k": 50, "top_p": 0.95, "temperature": 0.6},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "top_k": 40},
    {"logit_bias": {5: 3.0, 6: -100.0}, "min_tokens": 5, "stop_token_ids": [7, 8, 9]},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {},
]
LENGTHS = (5, 255, 256, 300, 513, 40, 41, 42)
PROMPTS = [random_prompt(length) for length in LENGTHS]


def params_of(i: int, **more: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": MAX_TOKENS, "seed": 1000 + i} | KINDS[i] | more))


ALL = [params_of(i) for i in range(len(KINDS))]


@pytest.fixture(scope="module")
def alone(path):
    """What each request gives alone in an engine."""
    results = []
    for prompt, params in zip(PROMPTS, ALL, strict=True):
        with engine(path, overlap=False, enable_prefix_caching=False) as (llm, log):
            results += tokens(run(llm, log, [prompt], [params]))
    assert all(len(ids) == MAX_TOKENS or ids[-1] in (7, 8, 9) for ids in results)
    assert all(len(set(ids)) > MAX_TOKENS // 3 for ids in results)
    return results


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
def test_a_seeded_request_gives_the_same_tokens_on_every_path(path, alone, settings):
    with engine(path, **settings) as (llm, log):
        for call in ("cold", "warm"):
            assert tokens(run(llm, log, PROMPTS, ALL)) == alone, call
        assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in settings)
        assert (log.most_chunks > 1) == ("max_num_batched_tokens" in settings)


def test_a_seeded_request_gives_the_same_tokens_in_a_batch_of_100(path, alone):
    others = [random_prompt(3 + i % 20, seed=i) for i in range(100 - len(PROMPTS))]
    kinds = itertools.cycle(KINDS)
    params = [
        SamplingParams(**({"max_tokens": 1 + i % 30} | next(kinds) | {"min_tokens": 0})) for i in range(len(others))
    ]
    with engine(path, kvcache_block_size=16) as (llm, log):
        seqs = run(llm, log, others[:50] + PROMPTS + others[50:], params[:50] + ALL + params[50:])
        assert tokens(seqs)[50 : 50 + len(PROMPTS)] == alone
        assert log.most_rows == 100


def test_another_seed_gives_other_tokens_and_the_engines_own_seeds_differ(path, alone):
    with engine(path) as (llm, log):
        others = tokens(run(llm, log, PROMPTS, [params_of(i, seed=5) for i in range(len(KINDS))]))
        unseeded = [tokens(run(llm, log, PROMPTS[:1] * 2, [params_of(0, seed=None)] * 2)) for _ in range(2)]
    assert [a != b for a, b in zip(others, alone, strict=True)] == [kind.get("temperature") != 0 for kind in KINDS]
    assert len({tuple(ids) for call in unseeded for ids in call}) == 4


# ---- what each parameter does


def test_pitfall_9_top_k_of_1_and_temperature_0_are_the_same_and_mix_with_sampled_rows(path):
    prompts = [random_prompt(length) for length in (5, 30, 40)]
    expected = [decisive_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 5.0, "top_k": 1},
        {"top_p": 1e-9},
        {"top_k": 50},
        {},
    ]
    params = [SamplingParams(**({"max_tokens": MAX_TOKENS} | kind)) for kind in kinds]
    with engine(path, seed=1) as (llm, log):
        seqs = run(llm, log, [p for p in prompts for _ in kinds], params * len(prompts))
        assert log.most_rows == len(kinds) * len(prompts)
    results = tokens(seqs)
    for i, ids in enumerate(expected):
        own = results[i * len(kinds) : (i + 1) * len(kinds)]
        assert own[:3] == [ids] * 3
        assert own[3] != ids and own[4] != ids


def test_pitfall_10_sampled_tokens_are_within_top_p(path):
    """Each of the tokens drawn by many requests belongs to the shortest beginning that reaches top_p."""
    prompt = random_prompt(12)
    with engine(path, seed=2) as (llm, log):
        seqs = run(llm, log, [prompt] * 300, [SamplingParams(top_p=0.6, max_tokens=1)] * 300)
    probabilities, order = reference_logits(path, prompt)[-1].softmax(-1).sort(descending=True)
    num_kept = int((probabilities.cumsum(-1) - probabilities < 0.6).sum())
    drawn = Counter(ids[0] for ids in tokens(seqs))
    assert set(drawn) <= set(order[:num_kept].tolist())
    assert num_kept > 1 and len(drawn) > 1


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.8},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -1.0},
        {"repetition_penalty": 1.1, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    ],
    ids=str,
)
def test_penalties_are_those_of_the_plain_definition(path, penalties):
    """Greedy tokens, with each step's logits from transformers and penalties in plain Python."""
    prompt = random_prompt(30)
    rep, pres, freq = (
        penalties.get(f"{n}_penalty", d) for n, d in (("repetition", 1), ("presence", 0), ("frequency", 0))
    )
    ids = list(prompt)
    for _ in range(12):
        logits = reference_logits(path, ids)[-1].tolist()
        counts = Counter(ids[len(prompt) :])
        for i in set(ids):
            logits[i] = logits[i] / rep if logits[i] > 0 else logits[i] * rep
            logits[i] -= freq * counts[i] + pres * (counts[i] > 0)
        second, best = sorted(logits)[-2:]
        assert best - second > CLEAR, "choose another prompt"
        ids.append(logits.index(best))
    params = SamplingParams(temperature=0, max_tokens=12, **penalties)
    for settings in ({}, {"max_num_batched_tokens": 8}):
        with engine(path, **settings) as (llm, log):
            assert tokens(run(llm, log, [prompt], [params])) == [ids[len(prompt) :]]
    assert ids[len(prompt) :] != decisive_tokens(path, prompt, MAX_TOKENS)[:12], "the penalty made no difference"


def test_logit_bias_forbids_and_forces(path):
    prompt = random_prompt(30)
    greedy = decisive_tokens(path, prompt, MAX_TOKENS)
    with engine(path) as (llm, log):
        forbid = SamplingParams(temperature=0, max_tokens=5, logit_bias={greedy[0]: -100})
        force = SamplingParams(max_tokens=5, logit_bias={42: 100})
        plain = SamplingParams(temperature=0, max_tokens=5)
        forbidden, forced, free = tokens(run(llm, log, [prompt] * 3, [forbid, force, plain]))
    assert greedy[0] not in forbidden
    assert forced == [42] * 5
    assert free == greedy[:5]


def test_stop_token_ids_end_with_their_id_and_min_tokens_bans_them_and_eos(path, tiny_model):
    prompt = random_prompt(30)
    greedy = decisive_tokens(path, prompt, MAX_TOKENS)
    third = greedy[2]
    assert third not in greedy[:2]
    eos_path = tiny_model(std=0.3, eos_token_id=third)
    kinds: dict[str, dict[str, Any]] = {
        "eos": {},
        "eos ignored": {"ignore_eos": True},
        "eos ignored, and a stop token": {"ignore_eos": True, "stop_token_ids": [third]},
        "another stop token": {"stop_token_ids": [greedy[1]]},
        "eos banned": {"min_tokens": 7},
        "stop token banned": {"min_tokens": 7, "stop_token_ids": [greedy[0]]},
    }
    params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS, **kind) for kind in kinds.values()]
    for settings in ({}, {"overlap": False}, {"kvcache_block_size": 16, "num_kvcache_blocks": 5}):
        with engine(eos_path, **settings) as (llm, log):
            seqs = dict(zip(kinds, run(llm, log, [prompt] * len(kinds), params), strict=True))
            assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in settings)
        ends = {name: (seq.completion_token_ids, seq.finish_reason, seq.stop_reason) for name, seq in seqs.items()}
        assert ends["eos"] == (greedy[:3], "stop", None)
        assert ends["eos ignored"] == (greedy, "length", None)
        assert ends["eos ignored, and a stop token"] == (greedy[:3], "stop", third)
        assert ends["another stop token"] == (greedy[:2], "stop", greedy[1])
        banned = ends["eos banned"][0]
        assert third not in banned[:7] and banned[:2] == greedy[:2] and len(banned) >= 7
        banned = ends["stop token banned"][0]
        assert not {greedy[0], third} & set(banned[:7]) and len(banned) >= 7


# ---- log probabilities

LOGPROB_SETTINGS = {
    "plain": {},
    "without overlap": {"overlap": False},
    "chunks": {"max_num_batched_tokens": 64},
    "preempted": {"kvcache_block_size": 16, "num_kvcache_blocks": 36},
}


@pytest.mark.parametrize("settings", LOGPROB_SETTINGS.values(), ids=LOGPROB_SETTINGS)
def test_logprobs_are_those_of_transformers(path, settings, monkeypatch):
    """Of raw logits: filters, penalties and temperature choose the token and do not change what is reported of it."""
    prompts = [random_prompt(length) for length in (1, 30, 200, 300)]
    more: list[dict[str, Any]] = [{}, {"top_k": 5, "repetition_penalty": 1.5}, {"temperature": 0}, {"temperature": 2.0}]
    wanted = [(0, 2), (3, 0), (5, 20), (None, 4)]
    params = [
        SamplingParams(**({"max_tokens": 8, "logprobs": own, "prompt_logprobs": prompt} | kind))
        for (own, prompt), kind in zip(wanted, more, strict=True)
    ]
    with engine(path, **settings) as (llm, log):
        monkeypatch.setattr(llm.model_runner.extras, "rows_per_chunk", 7)
        for _ in range(2):  # the second time the prefix is in the cache, and not used
            seqs = run(llm, log, prompts, params)
            for seq, (own, of_prompt) in zip(seqs, wanted, strict=True):
                check_logprobs(path, seq, own, of_prompt)
        assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in settings)
        assert (log.most_chunks > 1) == ("max_num_batched_tokens" in settings)


def check_logprobs(path: str, seq: Sequence, num_own: int | None, num_prompt: int) -> None:
    logprobs = reference_logits(path, seq.token_ids).log_softmax(-1)
    ids, start = seq.token_ids, seq.num_prompt_tokens
    assert seq.prompt_logprobs[0] is None and len(seq.prompt_logprobs) == start
    assert len(seq.logprobs) == (0 if num_own is None else seq.num_completion_tokens)
    positions = [(i, entry, num_prompt) for i, entry in enumerate(seq.prompt_logprobs)][1:]
    positions += [(start + i, entry, num_own) for i, entry in enumerate(seq.logprobs)]
    for i, entry, num_top in positions:
        expected = logprobs[i - 1]
        (token_id, logprob, rank), *top = entry
        assert token_id == ids[i]
        assert logprob == pytest.approx(expected[token_id].item(), abs=2e-4)
        assert rank == pytest.approx(1 + int((expected > expected[token_id]).sum()), abs=1)  # near ties may swap
        assert [r for _, _, r in top] == [r for r in range(1, num_top + 1) if r != rank]
        for other, value, r in top:
            assert value == pytest.approx(expected[other].item(), abs=2e-4)
            assert value == pytest.approx(expected.topk(r).values[-1].item(), abs=2e-4)


def test_prompt_logprobs_alone_skip_the_prefix_cache_and_fill_it(path):
    prompt = random_prompt(513)
    wanting = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    plain = SamplingParams(temperature=0, max_tokens=2)
    with engine(path) as (llm, log):
        first = run(llm, log, [prompt], [wanting])
        again = run(llm, log, [prompt], [wanting])
        assert log.first_hits == [0]
        assert tokens(run(llm, log, [prompt], [plain])) == tokens(first) == tokens(again)
        assert log.first_hits == [512]


# ---- what it costs those who do not ask for it


def test_a_batch_without_extras_never_comes_near_them(path, monkeypatch):
    with engine(path) as (llm, log):
        runner = llm.model_runner
        run(llm, log, PROMPTS[:3], [params_of(i) for i in (0, 3, 5)])  # rows that had extras once, and have none now
        monkeypatch.setattr(runner.extras, "apply_to", lambda *_: pytest.fail("there are no extras"))
        run(llm, log, PROMPTS[:3], [SamplingParams(max_tokens=5)] * 3)
        assert not runner.extras.rows


def test_a_row_that_goes_to_a_plain_request_has_no_extras_left(path):
    prompts = [random_prompt(length) for length in (5, 30, 40)]
    params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS)] * 3
    expected = [decisive_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]
    with engine(path, max_num_seqs=3) as (llm, log):
        run(llm, log, PROMPTS[:3], [SamplingParams(logit_bias={1: 100.0}, frequency_penalty=2.0, logprobs=1)] * 3)
        seqs = run(llm, log, prompts, params)
        assert tokens(seqs) == expected and not any(seq.logprobs for seq in seqs)
