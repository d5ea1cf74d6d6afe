"""The model computes in its last layer no more than what is read of it."""

from collections.abc import Callable

import pytest
import torch

from nanovllm import LLM
from nanovllm.engine.scheduler import Batch


@pytest.fixture(scope="module")
def runner(tiny_model: Callable[..., str]):
    with LLM(tiny_model(std=0.3), device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=8) as llm:
        yield llm.model_runner


def prefill(samples: list[bool], starts: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    batch = Batch(is_prefill=True, rows=[0, 1, 2], starts=starts, counts=[5, 40, 17], samples=samples)
    batch.token_ids = [torch.randint(5, 200, (n,), generator=generator).tolist() for n in batch.counts]
    batch.new_blocks = [(row, 0, [row]) for row in batch.rows]
    return batch


@pytest.mark.parametrize("starts", [[0, 0, 0], [0, 3, 9]], ids=["packed", "paged"])
@pytest.mark.parametrize(
    "samples", [[True] * 3, [False, True, False], [False] * 3], ids=["all sample", "one samples", "none samples"]
)
@torch.inference_mode()
def test_the_rows_that_are_read_are_those_of_the_whole(runner, samples: list[bool], starts: list[int]) -> None:
    batch = prefill(samples, starts)
    runner.kv_cache.normal_(generator=torch.Generator().manual_seed(1))
    runner.tables.update(batch)
    input_ids, positions, context = runner.prepare_prefill(batch)
    rows = context.logits_indices
    assert rows.tolist() == [row for row, sampled in zip([4, 44, 61], samples, strict=True) if sampled]
    few = runner.compute_logits(input_ids, positions, context)
    stored = runner.kv_cache.clone()
    context.want_logits(rows)  # by their number, whatever sequence they belong to
    named = runner.compute_logits(input_ids, positions, context)
    context.want_logits(None)
    everything = runner.compute_logits(input_ids, positions, context)
    assert everything.shape[0] == sum(batch.counts) and few.shape == named.shape == everything[rows].shape
    torch.testing.assert_close(few, everything[rows], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(named, everything[rows], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(runner.kv_cache, stored, rtol=1e-5, atol=1e-5)
