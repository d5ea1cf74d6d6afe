"""Greedy tokens equal transformers' `generate`, token for token, whatever path the engine takes to them."""

import json
from pathlib import Path

import pytest
import torch

from nanovllm import LLM
from tests.recording import engine, greedy
from tests.reference import decisive_tokens, random_prompt, story_prompt

LENGTHS = (1, 255, 256, 257, 511, 512, 513)
MAX_TOKENS = 20


def rarely(*values: object) -> object:
    """A parameter for the slow run: a bare `pytest` takes one of each kind to every configuration."""
    return pytest.param(*values, marks=pytest.mark.slow)


# Seeds for which every prompt's reference is decisive; `decisive_tokens` checks it again.
CONFIGS: dict[str, dict[str, object]] = {
    "tied_head": {"seed": 2, "tie_word_embeddings": True},
    "one_kv_head": {"seed": 0, "num_key_value_heads": 1, "head_dim": 16},
    "three_kv_heads": {
        "seed": 10,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "six_kv_heads": {
        "seed": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 16,
        "hidden_size": 80,
    },
    "head_dim_128": {"seed": 9, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
    "odd_sizes": {"seed": 0, "vocab_size": 601, "intermediate_size": 99, "hidden_size": 72},
    "odd_vocabulary_tied": {"seed": 4, "vocab_size": 601, "tie_word_embeddings": True},
    "sharded_files": {"seed": 3, "num_hidden_layers": 3, "max_shard_size": "50KB"},
    "rope_theta_1e6": {"seed": 1, "rope_theta": 1e6, "max_position_embeddings": 2048},
    "bias_rope_theta_5e5": {"seed": 34, "rope_theta": 5e5, "attention_bias": True},
}


@pytest.fixture(scope="module", params=[*CONFIGS, "bundled_model"])
def config(request, tiny_model, bundled_model):
    """(directory, prompts, the reference's completions)."""
    if request.param == "bundled_model":
        path = bundled_model
        prompts = [story_prompt(length) for length in LENGTHS]
    else:
        settings = CONFIGS[request.param]
        path = tiny_model(std=0.3, **settings)
        prompts = [random_prompt(length, settings.get("vocab_size", 512)) for length in LENGTHS]
    return path, prompts, [decisive_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]


def cacheable(prompts: list[list[int]], block_size: int) -> list[int]:
    """Tokens of each prompt that a warm prefix cache holds: full blocks, but never the last token."""
    return [(len(prompt) - 1) // block_size * block_size for prompt in prompts]


@torch.inference_mode()
def corrupt(llm: LLM, block_id: int) -> None:
    block = llm.model_runner.kv_cache[:, :, block_id]
    block.copy_(torch.randn(block.shape, generator=torch.Generator().manual_seed(0)))


def test_cold_in_one_batch(config):
    path, prompts, expected = config
    with engine(path) as (llm, log):
        assert greedy(llm, prompts, MAX_TOKENS) == expected
        assert log.most_rows == len(prompts) and not any(log.first_hits)


@pytest.mark.slow
def test_alone(config):
    path, prompts, expected = config
    with engine(path) as (llm, log):
        assert [greedy(llm, [prompt], MAX_TOKENS)[0] for prompt in prompts] == expected
        assert log.most_rows == 1 and not any(log.first_hits)


@pytest.mark.parametrize("block_size", [256, rarely(16)])
def test_warm_prefix_cache(config, block_size):
    path, prompts, expected = config
    with engine(path, kvcache_block_size=block_size) as (llm, log):
        greedy(llm, prompts, MAX_TOKENS)
        log.clear()
        assert greedy(llm, prompts, MAX_TOKENS) == expected
        assert log.first_hits == cacheable(prompts, block_size) and max(log.first_hits) >= 512 - block_size


@pytest.mark.slow
def test_without_overlap(config):
    path, prompts, expected = config
    with engine(path, overlap=False) as (llm, _):
        assert greedy(llm, prompts, MAX_TOKENS) == expected


@pytest.mark.slow
def test_without_prefix_cache(config):
    path, prompts, expected = config
    with engine(path, enable_prefix_caching=False) as (llm, log):
        assert [greedy(llm, prompts, MAX_TOKENS) for _ in range(2)] == [expected] * 2
        assert not any(log.first_hits)


@pytest.mark.parametrize(("block_size", "num_blocks"), [(256, 4), rarely(16, 37)])
def test_pool_so_small_that_it_preempts(config, block_size, num_blocks):
    path, prompts, expected = config
    pool = {"kvcache_block_size": block_size, "num_kvcache_blocks": num_blocks}
    with engine(path, **pool) as (llm, log):
        assert greedy(llm, prompts, MAX_TOKENS) == expected
        assert llm.scheduler.num_preemptions > 0
        assert max(log.preempted_lengths) > 255  # one that had something to lose


@pytest.mark.parametrize("budget", [300, rarely(256), rarely(512)])
def test_chunked_prefill(config, budget):
    path, prompts, expected = config
    with engine(path, max_num_batched_tokens=budget) as (llm, log):
        assert greedy(llm, prompts, MAX_TOKENS) == expected
        assert log.most_chunks > 1 and log.most_tokens == budget


@pytest.mark.slow
@pytest.mark.parametrize("max_num_seqs", [2, rarely(1), rarely(512)])
def test_max_num_seqs(config, max_num_seqs):
    path, prompts, expected = config
    with engine(path, max_num_seqs=max_num_seqs) as (llm, log):
        assert greedy(llm, prompts, MAX_TOKENS) == expected
        assert log.most_running == min(max_num_seqs, len(prompts))


def test_everything_at_once(config):
    """Warm cache, chunks, preemption and two sequences at a time, in small blocks."""
    path, prompts, expected = config
    settings = {"kvcache_block_size": 16, "num_kvcache_blocks": 66, "max_num_batched_tokens": 300, "max_num_seqs": 2}
    with engine(path, **settings) as (llm, log):
        # The longest first: two of them run side by side and outgrow the pool.
        assert greedy(llm, prompts[::-1], MAX_TOKENS) == expected[::-1]
        # Those that ended last are still cached.
        assert greedy(llm, prompts, MAX_TOKENS) == expected
        assert any(log.first_hits) and log.most_chunks > 1 and log.most_running == 2
        assert llm.scheduler.num_preemptions > 0


@pytest.mark.slow
def test_corrupting_one_cached_block_changes_the_output(config):
    """The counter-test of the warm ones: what they compare does come out of the cache."""
    path, prompts, expected = config
    with engine(path) as (llm, log):
        assert greedy(llm, prompts[-1:], MAX_TOKENS) == expected[-1:]
        last_cached_block = log.admissions[0][2][1]
        corrupt(llm, last_cached_block)
        assert greedy(llm, prompts[-1:], MAX_TOKENS) != expected[-1:]
        assert log.first_hits == [0, 512]
        llm.reset_prefix_cache()
        assert greedy(llm, prompts[-1:], MAX_TOKENS) == expected[-1:]


def test_the_sharded_configuration_has_shards(tiny_model):
    path = Path(tiny_model(std=0.3, **CONFIGS["sharded_files"]))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert not (path / "model.safetensors").exists()


# ---- Checkpoint dtypes


def test_pitfall_65_float32_checkpoint(tiny_model, caplog):
    """Equal to transformers layer by layer, and the hidden states that the engine reads are not changed in place."""
    path = tiny_model(std=0.3)
    prompt = random_prompt(40)
    with engine(path, dtype="float32") as (llm, _):
        assert llm.model_runner.dtype is torch.float32
        assert greedy(llm, [prompt] * 2, MAX_TOKENS) == [decisive_tokens(path, prompt, MAX_TOKENS)] * 2


def test_bfloat16_checkpoint_runs_in_float32_on_a_cpu(tiny_model, tmp_path, caplog):
    from transformers import Qwen3ForCausalLM

    source = tiny_model(std=0.3)
    Qwen3ForCausalLM.from_pretrained(source).to(torch.bfloat16).save_pretrained(tmp_path)
    prompts = [random_prompt(length) for length in (1, 40, 257)]
    expected = [decisive_tokens(str(tmp_path), prompt, MAX_TOKENS) for prompt in prompts]
    with caplog.at_level("INFO", logger="nanovllm"), engine(str(tmp_path)) as (llm, _):
        assert llm.config.model_config.dtype == "bfloat16" and llm.model_runner.dtype is torch.float32
        assert greedy(llm, prompts, MAX_TOKENS) == expected
    assert len([r for r in caplog.records if "float32" in r.message]) == 1
