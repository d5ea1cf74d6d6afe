"""Greedy tokens at 1, 2 and 4 ranks on gloo equal transformers', whatever path the engine takes to them.

A start costs seconds, so each engine goes through all the paths: its scheduler's settings, which are rank 0's alone,
change between the runs.
"""

import contextlib
import pickle
import time

import pytest

from nanovllm import LLM, SamplingParams
from tests.recording import engine, greedy
from tests.reference import decisive_tokens, random_prompt
from tests.tensor_parallel import faults
from tests.tensor_parallel.processes import wait_until

LENGTHS = (1, 30, 255, 256, 257, 600)
MAX_TOKENS = 20
# 640 tokens: fewer than the prompts have together, so that a batch of all of them preempts.
SMALL_POOL = {"kvcache_block_size": 16, "num_kvcache_blocks": 40}

# Four query heads and two KV heads unless said otherwise: on four ranks each KV head is held twice.
MODELS: dict[str, dict[str, object]] = {
    "plain": {"seed": 0},
    "tied": {"seed": 1, "tie_word_embeddings": True},
    "odd_vocabulary": {"seed": 0, "vocab_size": 601},
    "odd_vocabulary_tied": {"seed": 2, "vocab_size": 601, "tie_word_embeddings": True},
    "bias": {"seed": 2, "attention_bias": True},
    "one_kv_head": {"seed": 0, "num_key_value_heads": 1, "head_dim": 16},
}
QUICK = [("odd_vocabulary_tied", 2)]
CASES = [
    pytest.param(model, ranks, marks=[] if (model, ranks) in QUICK else pytest.mark.slow, id=f"{model}-{ranks}")
    for model in MODELS
    for ranks in (1, 2, 4)
    if ranks > 1 or model == "plain"  # one rank goes through all of this in tests/test_parity.py
]


@pytest.fixture
def case(tiny_model):
    """`case(name)` -> (directory, prompts, the reference's completions)."""

    def make(name: str) -> tuple[str, list[list[int]], list[list[int]]]:
        settings = MODELS[name]
        path = tiny_model(std=0.3, **settings)
        prompts = [random_prompt(length, settings.get("vocab_size", 512)) for length in LENGTHS]
        return path, prompts, [decisive_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]

    return make


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_greedy_equals_transformers(case, name, ranks):
    """Pitfalls 42 and 50: alone and in batches, with chunks, prefix hits and preemption, with overlap and without."""
    path, prompts, expected = case(name)
    with engine(path, tensor_parallel_size=ranks, **SMALL_POOL) as (llm, log):
        assert greedy(llm, prompts[2:3], MAX_TOKENS) == expected[2:3]  # a batch of one
        assert not any(log.first_hits)
        for overlap in (True, False):
            llm.config.overlap = overlap

            llm.reset_prefix_cache()
            log.clear()
            assert greedy(llm, prompts, MAX_TOKENS) == expected
            assert max(log.preempted_lengths) > 255 and log.most_rows >= 4

            llm.scheduler.max_num_batched_tokens = 200
            log.clear()
            order = [5, 4, 3, 2, 1, 0]
            assert greedy(llm, [prompts[i] for i in order], MAX_TOKENS) == [expected[i] for i in order]
            assert log.most_chunks > 1 and log.most_tokens == 200

            llm.scheduler.max_num_batched_tokens = 16384
            log.clear()
            for i in (3, 3):
                assert greedy(llm, [prompts[i]], MAX_TOKENS) == [expected[i]]
            assert log.first_hits[-1] == 240


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_sampling_is_the_same_on_any_number_of_ranks(case, ranks):
    path, prompts, _ = case("odd_vocabulary")
    plain = [{"temperature": t} for t in (0, 0.3, 0.7, 1, 1, 2)]
    extras = [
        {"top_k": 10, "seed": 3},
        {"top_p": 0.7, "logprobs": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 4},
        {"logit_bias": {5: 3.0}, "stop_token_ids": list(range(9)), "min_tokens": 7},
        {"temperature": 0, "presence_penalty": 1.0, "prompt_logprobs": 2},
        {},
    ]
    params = [SamplingParams(**({"max_tokens": MAX_TOKENS, "ignore_eos": True} | one)) for one in plain + extras]

    def sampled(ranks: int) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
        """Completions, and ids and ranks of all log probabilities."""
        with engine(path, tensor_parallel_size=ranks, seed=7, **SMALL_POOL) as (llm, log):
            llm.generate(prompts * 2, params, use_tqdm=False)
            assert llm.scheduler.num_preemptions > 0
        entries = [entry for seq in log.seqs for entry in seq.logprobs + seq.prompt_logprobs[1:]]
        return [seq.completion_token_ids for seq in log.seqs], [[(i, r) for i, _, r in entry] for entry in entries]

    alone = sampled(1)
    assert sampled(ranks) == alone
    assert len({tuple(ids) for ids in alone[0]}) == len(params)
    assert len(alone[1]) == MAX_TOKENS + len(prompts[4]) - 1


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_pitfall_50_every_rank_computes_the_same_steps_and_gets_the_same_tokens(case, monkeypatch, tmp_path, ranks):
    path, prompts, expected = case("plain")
    faults.record_steps(monkeypatch, tmp_path)
    with engine(path, tensor_parallel_size=ranks, **SMALL_POOL) as (llm, _):
        own = record_rank_0(llm)
        assert greedy(llm, prompts, MAX_TOKENS) == expected
        assert llm.scheduler.num_preemptions > 0
        llm._workers.call("dump")
        files = [tmp_path / f"rank-{rank}" for rank in range(1, ranks)]
        assert wait_until(lambda: all(file.exists() for file in files), 20)
        for file in files:
            assert pickle.loads(file.read_bytes()) == own
    assert len(own) > MAX_TOKENS


def record_rank_0(llm: LLM) -> list[object]:
    steps: list[object] = []
    launch = llm.model_runner.launch

    def recorded(batch: object) -> object:
        handle = launch(batch)
        steps.append(faults.entry(batch, handle.wait()))
        return handle

    llm.model_runner.launch = recorded
    return steps


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param({0: 60, 1: 33}, id="rank_1_has_less"),
        pytest.param({0: 33, 1: 60}, id="rank_0_has_less", marks=pytest.mark.slow),
    ],
)
def test_pitfall_41_the_smallest_pool_is_everybodys(case, monkeypatch, blocks):
    path, prompts, expected = case("plain")
    faults.set_blocks(monkeypatch, blocks)
    with engine(path, tensor_parallel_size=2, kvcache_block_size=16, num_kvcache_blocks=-1) as (llm, log):
        assert llm.model_runner.num_kvcache_blocks == len(llm.scheduler.block_manager.blocks) == 33
        assert llm.model_runner.kv_cache.shape[2] == 33
        assert llm.max_model_len == 33 * 16
        # Three that need the pool to its last block; the worker's cache has no more.
        assert greedy(llm, prompts[1:4], MAX_TOKENS) == expected[1:4]
        assert max(max(table) for _, _, table in log.admissions) == 32


@pytest.mark.slow
def test_two_ranks_on_two_cores_are_at_most_three_times_slower_than_one(bundled_model):
    prompts = [random_prompt(64, seed=seed) for seed in range(16)]

    def seconds(ranks: int) -> float:
        with contextlib.ExitStack() as stack:
            llm, _ = stack.enter_context(engine(bundled_model, tensor_parallel_size=ranks))
            greedy(llm, prompts, 8)
            times = []
            for _ in range(3):
                llm.reset_prefix_cache()
                start = time.perf_counter()
                greedy(llm, prompts, 64)
                times.append(time.perf_counter() - start)
            return min(times)

    alone, shared = seconds(1), seconds(2)
    print(f"1 rank {alone:.2f} s, 2 ranks {shared:.2f} s, ratio {shared / alone:.2f}")
    assert shared <= 3 * alone, (alone, shared)
