"""Inputs that broke engines of this kind, in scheduler, block manager, prefix cache and chunked prefill.

The numbers are those of the project's list. Every engine here has its books checked after each step (recording.py).
"""

import pytest

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from tests.recording import CLEAR, engine, greedy
from tests.reference import decisive_tokens, random_prompt

MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model(std=0.3)


@pytest.mark.parametrize("length", [256, 512])
def test_pitfall_20_a_prompt_of_whole_blocks_twice(path, length):
    prompt = random_prompt(length)
    expected = decisive_tokens(path, prompt, MAX_TOKENS)
    with engine(path) as (llm, log):
        assert greedy(llm, [prompt, prompt], MAX_TOKENS) == [expected] * 2
        assert log.first_hits == [0, 0]  # side by side: there was nothing to share yet
    with engine(path) as (llm, log):
        for _ in range(2):
            assert greedy(llm, [prompt], MAX_TOKENS) == [expected]
        assert log.first_hits == [0, length - 256]  # the last token is always computed


# Seeds for which all 300 tokens have a clear margin.
LONG_RUNS = {255: 0, 256: 0, 257: 0, 511: 0, 512: 2, 513: 10}


@pytest.fixture(scope="module")
def long_runs(path):
    prompts = [random_prompt(length, seed=seed) for length, seed in LONG_RUNS.items()]
    return prompts, [decisive_tokens(path, prompt, 300) for prompt in prompts]


@pytest.mark.parametrize("block_size", [16, pytest.param(256, marks=pytest.mark.slow)])
def test_pitfall_21_300_tokens_from_around_a_block_boundary(path, long_runs, block_size):
    prompts, expected = long_runs
    with engine(path, kvcache_block_size=block_size) as (llm, log):
        assert greedy(llm, prompts, 300) == expected
        log.clear()
        # Once more, prompt and half the completion in one: a prefix that was decoded, not prefilled, is shared too.
        longer = [prompt + ids[:150] for prompt, ids in zip(prompts, expected, strict=True)]
        assert greedy(llm, longer, 150) == [ids[150:] for ids in expected]
        assert log.first_hits == [(len(prompt) - 1) // block_size * block_size for prompt in longer]


# Without the seeds whose completion comes near a tie somewhere.
TIES = {
    16: {7, 8},
    256: {2, 3, 4, 10, 19, 20, 29, 33, 39, 42, 43, 44, 46, 47, 50, 51, 53, 54, 55, 57, 60, 62, 64, 66, 68, 71, 73, 74}
    | {80, 81, 83, 84, 88, 89, 90, 94},
}


def shared_prefix_run(path: str, block_size: int, tail: int, max_tokens: int) -> None:
    """64 prompts of one block and `tail` tokens, that share the block; in a pool of 40 blocks and in a big one."""
    prefix = random_prompt(block_size, seed=22)
    seeds = [seed for seed in range(100) if seed not in TIES[block_size]][:64]
    prompts = [prefix + random_prompt(tail, seed=seed) for seed in seeds]
    results = []
    for num_blocks in (40, 512):
        with engine(path, kvcache_block_size=block_size, num_kvcache_blocks=num_blocks) as (llm, log):
            results.append(greedy(llm, prompts, max_tokens))
            assert min(log.gaps) > CLEAR, "choose other seeds"
            assert (llm.scheduler.num_preemptions > 0) == (num_blocks == 40)
            assert block_size in log.first_hits or num_blocks > 40
    small, big = results
    assert small == big
    assert [len(ids) for ids in small] == [max_tokens] * 64 and len(set(map(tuple, small))) == 64


def test_pitfall_22_64_prompts_with_a_shared_prefix_in_a_small_pool(path):
    shared_prefix_run(path, block_size=16, tail=15, max_tokens=20)


@pytest.mark.slow
def test_pitfall_22_at_full_size(path):
    shared_prefix_run(path, block_size=256, tail=244, max_tokens=300)


@pytest.mark.parametrize("overlap", [False, True])
def test_pitfall_23_preempted_at_exactly_257_tokens(path, overlap):
    prompts = [random_prompt(250), random_prompt(250, seed=1)]
    expected = [decisive_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]
    # Two blocks in use, one free, and both need one for their token 257: the second is preempted.
    with engine(path, num_kvcache_blocks=3, overlap=overlap) as (llm, log):
        assert greedy(llm, prompts, MAX_TOKENS) == expected
        assert log.preempted_lengths == [257]
        # It came back with its first block still cached, and computed only what was lost.
        assert [(seq.seq_id, cached) for seq, cached, _ in log.admissions] == [(0, 0), (1, 0), (1, 256)]


def test_pitfall_24_identical_prompts_in_one_call(path):
    prompt = random_prompt(600)
    expected = [decisive_tokens(path, prompt, MAX_TOKENS)] * 8
    with engine(path) as (llm, log):
        assert greedy(llm, [prompt] * 8, MAX_TOKENS) == expected
        assert log.first_hits == [0] * 8  # all in one step: no block of it may be shared before its K/V exist
    with engine(path, max_num_batched_tokens=700, overlap=False) as (llm, log):
        assert greedy(llm, [prompt] * 8, MAX_TOKENS) == expected
        # The second prompt starts in the first one's step, the others find what both have left.
        assert log.first_hits == [0, 0] + [512] * 6
        assert log.most_tokens <= 700


@pytest.mark.parametrize("num_junk", [1, 2, 3])
def test_pitfall_25_recycled_blocks_are_forgotten(path, num_junk):
    prompt = random_prompt(600)
    expected = decisive_tokens(path, prompt, MAX_TOKENS)
    junk = [random_prompt(500, seed=i) for i in range(num_junk)]
    # 4 blocks: A leaves two full ones; junk takes those that hold no prefix and then A's, its tail first.
    with engine(path, num_kvcache_blocks=4) as (llm, log):
        for _ in range(2):
            log.clear()
            assert greedy(llm, [prompt], MAX_TOKENS) == [expected]
            for one in junk:
                greedy(llm, [one], 3)
            assert greedy(llm, [prompt], MAX_TOKENS) == [expected]
            assert log.first_hits[-1] == {1: 512, 2: 256, 3: 0}[num_junk]


def test_pitfall_26_the_hash_survives_the_free(path):
    shared = random_prompt(520)
    prompts = [shared + random_prompt(30, seed=i) for i in range(3)]
    expected = [decisive_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]
    with engine(path) as (llm, log):
        for prompt, ids in zip(prompts, expected, strict=True):
            assert greedy(llm, [prompt], MAX_TOKENS) == [ids]
        assert log.first_hits == [0, 512, 512]
        llm.reset_prefix_cache()
        assert greedy(llm, prompts[:1], MAX_TOKENS) == expected[:1]
        assert log.first_hits[-1] == 0


def test_pitfall_27_a_prompt_larger_than_the_pool(path, caplog):
    with caplog.at_level("WARNING", logger="nanovllm"), engine(path, num_kvcache_blocks=2) as (llm, _):
        (warning,) = [record.getMessage() for record in caplog.records if "max_model_len" in record.getMessage()]
        assert "max_model_len=4096 lowered to 512" in warning and "num_kvcache_blocks" in warning
        assert llm.max_model_len == 512
        for length in (512, 513, 600):
            with pytest.raises(ValueError, match=rf"{length} tokens.*KV cache holds 512 tokens.*raise num_kvcache_bl"):
                llm.generate([[1, 2, 3], random_prompt(length)], GREEDY, use_tqdm=False)
        # What fits uses the pool to its last slot.
        prompt = random_prompt(495)
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
        assert output["token_ids"] == decisive_tokens(path, prompt, 17)
        assert output["finish_reason"] == "length"


def test_pitfall_27_a_pool_that_is_large_enough_lowers_nothing(path, caplog):
    with (
        caplog.at_level("WARNING", logger="nanovllm"),
        engine(path, num_kvcache_blocks=2, max_model_len=512) as (llm, _),
    ):
        assert llm.max_model_len == 512 and not caplog.records


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_blocks", "num_preemptions"), [(2, 1), (3, 1), (4, 0)])
def test_pitfall_28_two_sequences_cross_a_block_boundary_together(path, num_blocks, num_preemptions, overlap):
    prompts = [random_prompt(250), random_prompt(250, seed=1)]
    expected = [decisive_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]
    with engine(path, num_kvcache_blocks=num_blocks, overlap=overlap) as (llm, _):
        assert greedy(llm, prompts, MAX_TOKENS) == expected
        assert llm.scheduler.num_preemptions == num_preemptions


# 29 (an empty engine steps; all blocks come back) is in test_generate.py, and in `assert_idle` for every engine here.


@pytest.mark.parametrize("budget", [256, 300, 512, 1000])
def test_pitfall_30_a_prompt_in_chunks(path, budget):
    prompt = random_prompt(1300, seed=1)
    expected = decisive_tokens(path, prompt, MAX_TOKENS)
    with engine(path, max_num_batched_tokens=budget) as (llm, log):
        runner, key_lens = llm.model_runner, []
        prepare = runner.prepare_prefill

        def recorded(batch: object) -> object:
            prepared = prepare(batch)
            context = prepared[2]
            key_lens.append((context.key_lens, context.cu_seqlens_k.tolist(), context.max_seqlen_k))
            return prepared

        runner.prepare_prefill = recorded
        assert greedy(llm, [prompt], MAX_TOKENS) == [expected]
        ends = [min(end, 1300) for end in range(budget, 1300 + budget, budget)]
        assert log.most_chunks == len(ends) > 1
        assert key_lens == [([end], [0, end], end) for end in ends]  # up to the chunk's end, not the prompt's


def test_pitfall_31_no_step_exceeds_the_token_budget(path):
    prompts = [random_prompt(200, seed=i) for i in range(20)]
    with engine(path, max_num_batched_tokens=512) as (llm, log):
        assert [len(ids) for ids in greedy(llm, prompts, 5)] == [5] * 20
        assert log.most_tokens == 512 and log.most_running == 20
        # Full steps until the prompts are through.
        assert [sum(step.counts) for step in log.steps if step.is_prefill] == [512] * 7 + [416]


def test_pitfall_31_a_budget_smaller_than_the_batch_bounds_decode_too(path):
    with engine(path, max_num_batched_tokens=6) as (llm, log):
        assert [len(ids) for ids in greedy(llm, [[i] for i in range(20)], 5)] == [5] * 20
        assert log.most_tokens == 6 and log.most_running == 6


def test_pitfall_31_never_more_running_than_max_num_seqs(path):
    prompts = [random_prompt(1 + i % 40, seed=i) for i in range(100)]
    with engine(path, max_num_seqs=2, max_num_batched_tokens=30) as (llm, log):
        assert [len(ids) for ids in greedy(llm, prompts, 3)] == [3] * 100
        assert log.most_running == 2 and log.most_rows == 2


@pytest.mark.parametrize("constant", [0, 7])
def test_pitfall_32_every_block_has_the_same_hash(path, monkeypatch, constant):
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda token_ids, prefix=None: constant))
    common, tail = random_prompt(256, seed=5), random_prompt(20, seed=6)
    prompts = {
        "one": random_prompt(256, seed=3) + common + tail,
        "another first block, then the same one": random_prompt(256, seed=4) + common + tail,
        "the common block first, where nothing precedes it": common + tail,
        "twice the same block": common + common + tail,
    }
    expected = {name: decisive_tokens(path, prompt, MAX_TOKENS) for name, prompt in prompts.items()}
    with engine(path) as (llm, log):
        for order in (list(prompts), list(reversed(prompts))):
            for name in order:
                assert greedy(llm, [prompts[name]], MAX_TOKENS) == [expected[name]], name
        # The one entry that all blocks share still serves a prefix of one block.
        name = "the common block first, where nothing precedes it"
        for _ in range(2):
            assert greedy(llm, [prompts[name]], MAX_TOKENS) == [expected[name]]
        assert log.first_hits[-1] == 256
    with engine(path) as (llm, _):
        for _ in range(2):
            assert greedy(llm, list(prompts.values()), MAX_TOKENS) == list(expected.values())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("max_num_seqs", "gap"), [(512, 30), (5, 3)])
def test_pitfall_33_the_gap_that_arriving_prompts_make(path, overlap, max_num_seqs, gap):
    """Prefill goes first: a decoding sequence waits for all prompts that can be admitted, budget by budget.

    50 prompts of 300 tokens at 512 a step are 30 steps. Where only 4 of them may run beside it, they are 3.
    """
    budget = 512
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs, "num_kvcache_blocks": 128}
    with engine(path, overlap=overlap, **settings) as (llm, log):
        long = llm.add_request(random_prompt(10), SamplingParams(temperature=0, max_tokens=60))
        for _ in range(20):
            llm.step()
        for i in range(50):
            llm.add_request(random_prompt(300, seed=i), SamplingParams(temperature=0, max_tokens=10))
        while not llm.is_finished():
            llm.step()
    decodes = [i for i, step in enumerate(log.steps) if not step.is_prefill and long in step.seq_ids]
    assert len(decodes) == 59  # the first token came with the prefill
    between = [log.steps[a + 1 : b] for a, b in zip(decodes, decodes[1:], strict=False)]
    longest = max(between, key=len)
    tokens = sum(sum(step.counts) for step in longest)
    report = f"between two tokens: {len(longest)} steps, {tokens} tokens of others' prompts"
    admitted = min(50, max_num_seqs - 1) * 300
    assert tokens == admitted and len(longest) == -(-admitted // budget) == gap, report
