"""Sampling on a GPU: the compiled filter kernel against its plain twin at full size, and extras behind CUDA graphs."""

from collections.abc import Callable

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers.filters import FilterTables, filtered_sample, filtered_sample_plain, log_min_p
from tests.filter_reference import reference_survivors
from tests.gpu.test_gpu_engine import SMALL, make_llm, num_compiled_kernels, random_prompts  # noqa: F401

pytestmark = pytest.mark.gpu

VOCAB = 151_936
FILTERS = [  # temperature, top_k, top_p, min_p
    (1.0, 1, 1.0, 0.0),
    (0.6, 20, 1.0, 0.0),
    (1.0, 3000, 1.0, 0.0),
    (1.0, 20_000, 1.0, 0.0),
    (1.0, 151_935, 1.0, 0.0),
    (1.0, 0, 0.5, 0.0),
    (0.6, 0, 0.95, 0.0),
    (1.0, 0, 0.999, 0.0),
    (1.0, 0, 1.0, 0.02),
    (0.6, 20, 0.95, 0.0),
    (1.3, 500, 0.9, 0.01),
    (1.0, 0, 0.8, 0.001),
    (0.0, 5, 0.5, 0.5),
    (1.0, 0, 1.0, 0.0),
]
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, FilterTables]


def rows_of(filters: list[tuple[float, int, float, float]]) -> Rows:
    temperatures, top_ks, top_ps, min_ps = zip(*filters, strict=True)
    n = len(filters)
    rows = torch.arange(n, device="cuda")
    floats = [torch.tensor(x, device="cuda") for x in (temperatures, top_ps, [log_min_p(p) for p in min_ps])]
    top_ks = torch.tensor(top_ks, dtype=torch.int32, device="cuda")
    return rows, rows, rows + 50, FilterTables(rows * 2**33 + 1, floats[0], top_ks, *floats[1:])


def logits_of(kind: str, n: int) -> torch.Tensor:
    torch.manual_seed(0)
    logits = torch.randn(n, VOCAB, device="cuda")
    if kind == "peaked":
        logits = 3 * logits.sign() * logits.abs() ** 2
    elif kind == "tied":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.zeros_like(logits)
    elif kind == "negative":
        logits = 0.01 * logits - 30
    return logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["normal", "peaked", "tied", "equal", "negative"])
def test_the_kernel_draws_what_its_twin_draws_at_full_size(kind: str, dtype: torch.dtype) -> None:
    """Many seeds of each filter. A row may differ only where top_p is reached up to the rounding of float32."""
    logits = logits_of(kind, len(FILTERS)).to(dtype)
    repeats = 4
    filters = FILTERS * repeats
    _, rows, positions, tables = rows_of(filters)
    lines = torch.arange(len(FILTERS), device="cuda").repeat(repeats)
    ours = filtered_sample(logits, lines, rows, positions, tables).tolist()
    twin = filtered_sample_plain(logits, lines, rows, positions, tables).tolist()
    for i, (a, b) in enumerate(zip(ours, twin, strict=True)):
        one = filters[i]
        if a != b:
            assert one[2] < 1, f"filter {one} has no rounding to be wrong by"
            certain, possible = reference_survivors(logits[lines[i]].float().cpu().numpy(), *one)
            assert a in possible and (a not in certain or b not in certain), (one, a, b)


@pytest.mark.parametrize("kind", ["normal", "tied", "equal"])
def test_what_is_drawn_survives_in_float64(kind: str) -> None:
    logits = logits_of(kind, 1).bfloat16()
    values = logits[0].float().cpu().numpy()
    for one in FILTERS:
        certain, possible = reference_survivors(values, *one)
        lines, rows, positions, tables = rows_of([one] * 200)
        drawn = set(filtered_sample(logits, lines * 0, rows, positions, tables).tolist())
        assert drawn <= possible, one
        if len(certain) < 20 and kind == "equal":  # 200 draws of at most 20 equal tokens
            assert len(drawn) >= 0.9 * len(certain), one


def test_a_row_is_the_same_alone_in_a_batch_and_again() -> None:
    logits = logits_of("normal", 64).bfloat16()
    lines, rows, positions, tables = rows_of([FILTERS[i % len(FILTERS)] for i in range(64)])
    together = filtered_sample(logits, lines, rows, positions, tables)
    assert torch.equal(together, filtered_sample(logits, lines, rows, positions, tables))
    for i in range(0, 64, 5):
        at = slice(i, i + 1)
        assert torch.equal(filtered_sample(logits, lines[at], rows[at], positions[at], tables), together[at])


KINDS = [
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {5: 3.0}, "min_tokens": 6, "stop_token_ids": list(range(50))},
    {"logprobs": 3},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {},
]


def test_graphs_and_eager_steps_give_the_same_tokens_with_all_extras(make_llm: Callable[..., LLM]) -> None:  # noqa: F811
    """In float32, where a batch of another size does not turn a choice round."""
    shape = SMALL | dict(vocab_size=1000)
    prompts = random_prompts(len(KINDS) * 3, 1, 300, vocab_size=1000)
    params = [
        SamplingParams(**({"max_tokens": 30 + i, "seed": i, "ignore_eos": True} | KINDS[i % len(KINDS)]))
        for i in range(len(prompts))
    ]
    results = []
    for settings in ({}, {"overlap": False}, {"enforce_eager": True}):
        llm = make_llm(shape, dtype="float32", num_kvcache_blocks=100, **settings)
        assert (llm.model_runner.graphs is None) == ("enforce_eager" in settings)
        results.append([output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)])
        llm.exit()
    assert results[0] == results[1]
    same = sum(a == b for a, b in zip(results[0], results[2], strict=True))
    assert same >= len(prompts) - 2, "kernels of graphs and eager steps may differ in the last bits, not more"


def test_the_logits_of_a_graph_are_those_that_the_extras_read(make_llm: Callable[..., LLM]) -> None:  # noqa: F811
    """top_k=1 through the extras equals the plain argmax inside the graph, at every batch size of the ladder."""
    llm = make_llm(max_num_seqs=40, num_kvcache_blocks=100)
    prompts = random_prompts(40, 1, 60)
    greedy, top_1 = (
        [SamplingParams(max_tokens=4 + i, ignore_eos=True, **kind) for i in range(40)]
        for kind in ({"temperature": 0.0}, {"top_k": 1})
    )
    expected = [output["token_ids"] for output in llm.generate(prompts, greedy, use_tqdm=False)]
    llm.reset_prefix_cache()
    assert [output["token_ids"] for output in llm.generate(prompts, top_1, use_tqdm=False)] == expected


def test_pitfall_67_extras_compile_nothing_after_warm_up(make_llm: Callable[..., LLM]) -> None:  # noqa: F811
    llm = make_llm(max_num_seqs=16)
    llm.generate(random_prompts(16, 300, 300), SamplingParams(max_tokens=4), use_tqdm=False)
    before = num_compiled_kernels()
    for num_seqs in (1, 2, 7, 16):
        prompts = random_prompts(num_seqs, 1, 700, seed=num_seqs)
        params = [SamplingParams(**({"max_tokens": 8} | KINDS[i % len(KINDS)])) for i in range(num_seqs)]
        llm.generate(prompts, params, use_tqdm=False)
    assert num_compiled_kernels() == before


def test_512_rows_with_all_extras_stay_within_the_memory(make_llm: Callable[..., LLM]) -> None:  # noqa: F811
    from tests.gpu.test_gpu_engine import QWEN3_06B

    llm = make_llm(QWEN3_06B, gpu_memory_utilization=0.97, max_num_seqs=512, max_model_len=4096)
    everything = SamplingParams(
        temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1, logprobs=20, prompt_logprobs=20, max_tokens=4
    )
    outputs = llm.generate(random_prompts(512, 2, 40), everything, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [4] * 512
    free, total = torch.cuda.mem_get_info()
    assert free > 0.01 * total, f"only {free} bytes of the 3 % that are not ours are left"
