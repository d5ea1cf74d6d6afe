"""The engine on a GPU: graphs, backends, precision, memory. Skipped, with the reason, where there is no GPU."""

import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import nanovllm.kernels
from nanovllm import LLM, SamplingParams
from nanovllm.backends.flash_attn_backend import FlashAttnBackend
from nanovllm.engine.cuda_graph import DecodeGraphs, graph_sizes
from nanovllm.engine.row_tables import upload
from nanovllm.engine.scheduler import Batch
from nanovllm.utils.teacher_forcing import check_logits

pytestmark = pytest.mark.gpu

SMALL = dict(
    vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
QWEN3_06B = dict(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture
def make_llm(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    """Engines with random weights on given shapes, given back at the end of the test."""
    made: list[LLM] = []

    def make(shape: dict[str, object] = SMALL, **kwargs: object) -> LLM:
        common = dict(
            architectures=["Qwen3ForCausalLM"], rope_theta=1e6, max_position_embeddings=40960, torch_dtype="bfloat16"
        )
        (tmp_path / "config.json").write_text(json.dumps(common | shape))
        defaults = dict(load_format="dummy", skip_tokenizer_init=True, seed=0, max_model_len=2048)
        defaults |= dict(gpu_memory_utilization=0.3) if "num_kvcache_blocks" not in kwargs else {}
        llm = LLM(str(tmp_path), **(defaults | kwargs))
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.exit()


def random_prompts(num: int, low: int, high: int, vocab_size: int = 4096, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (num,), generator=generator).tolist()
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def fill_rows(llm: LLM, prompts: list[list[int]]) -> list[int]:
    """Prefill `prompts` into rows 0, 1, ... past the scheduler; returns the positions of their next tokens."""
    runner = llm.model_runner
    width = max(len(prompt) for prompt in prompts) // runner.block_size + 1
    rows = list(range(len(prompts)))
    batch = Batch(is_prefill=True, rows=rows, starts=[0] * len(rows), counts=[len(p) for p in prompts])
    batch.samples, batch.token_ids = [True] * len(rows), prompts
    batch.new_rows = [(row, 0.0, 0) for row in rows]
    batch.new_blocks = [(row, 0, list(range(row * width, (row + 1) * width))) for row in rows]
    runner.run(batch)
    return [len(prompt) for prompt in prompts]


BACKENDS = ["torch", "triton", "flash_attn", "flash_attn,triton"]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_logits_match_the_torch_backend(make_llm: Callable[..., LLM], backend: str, head_dim: int) -> None:
    skip_without_flash_attn(backend)
    llm = make_llm(SMALL | dict(head_dim=head_dim), attention_backend=backend)
    prompts = random_prompts(8, 1, 700)
    outputs = llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=100), use_tqdm=False)
    report = check_logits(llm, [(p, o["token_ids"]) for p, o in zip(prompts, outputs, strict=True)])
    assert report.num_positions == 8 * 100
    assert report.max_error < 0.05
    assert report.same_argmax > 0.9


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefix_and_chunks_match_a_plain_prefill(make_llm: Callable[..., LLM], backend: str) -> None:
    """The paged prefill of every backend: logits behind a chunked prompt, and behind a cached prefix."""
    skip_without_flash_attn(backend)
    prompts = random_prompts(6, 600, 1500)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    plain = make_llm(attention_backend="torch", num_kvcache_blocks=64)
    expected = last_logits(plain, prompts, params)
    chunked = make_llm(attention_backend=backend, num_kvcache_blocks=64, max_num_batched_tokens=500)
    for _ in ("cold, in chunks", "warm: all but the last block is cached"):
        actual = last_logits(chunked, prompts, params)
        assert actual.keys() == expected.keys()
        for prompt_id, logits in actual.items():
            error = (logits - expected[prompt_id]).norm() / expected[prompt_id].norm()
            assert error < 0.05, (backend, prompt_id, error)


def last_logits(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[int, torch.Tensor]:
    """Logits behind each prompt, by prompt index, caught on their way to the sampler."""
    runner, caught, seqs = llm.model_runner, {}, []
    launch, sample, queue = runner.launch, runner.sampler, llm.scheduler.add
    batches: list[Batch] = []

    def catch(logits: torch.Tensor, *args: object) -> torch.Tensor:
        done = [seq for seq, samples in zip(batches[-1].seqs, batches[-1].samples, strict=True) if samples]
        caught.update({seqs.index(seq): row for seq, row in zip(done, logits.float(), strict=True)})
        return sample(logits, *args)

    runner.launch = lambda batch: batches.append(batch) or launch(batch)
    runner.sampler = catch
    llm.scheduler.add = lambda seq: seqs.append(seq) or queue(seq)
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        del runner.launch, llm.scheduler.add
        runner.sampler = sample
    return caught


@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
def test_graphs_and_eager_give_the_same_bits(make_llm: Callable[..., LLM], backend: str) -> None:
    skip_without_flash_attn(backend)
    llm = make_llm(attention_backend=backend)
    runner = llm.model_runner
    for num_seqs, size in ((1, 1), (3, 4), (9, 16), (40, 48)):
        positions = fill_rows(llm, random_prompts(num_seqs, 1, 900, seed=num_seqs))
        step = lambda *inputs: (runner.decode_logits(*inputs), None)  # noqa: E731
        graphs = DecodeGraphs(step, size, runner.tables.pad_row, runner.device)
        graphs.capture([size])
        replayed = graphs.replay(list(range(num_seqs)), positions)[0].clone()
        pad = size - num_seqs
        rows = list(range(num_seqs)) + [runner.tables.pad_row] * pad
        eager = runner.decode_logits(*upload([rows, positions + [-1] * pad], torch.int64, runner.device))[:num_seqs]
        assert torch.isfinite(eager).all()
        assert torch.equal(replayed, eager)


def test_bfloat16_is_as_precise_as_transformers(tmp_path: Path) -> None:
    """On Qwen3-0.6B's shapes, against the same weights in float32: our error is at most 1.5 times transformers'."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**QWEN3_06B, rope_theta=1e6, initializer_range=0.04, eos_token_id=None, bos_token_id=None)
    with torch.device("cuda"):
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    prompts = random_prompts(4, 300, 700, vocab_size=151936)

    def logits_in(dtype: torch.dtype) -> list[torch.Tensor]:
        # Loaded anew: casting a live model would round its RoPE frequencies too.
        model = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=dtype).cuda().eval()
        with torch.inference_mode():
            return [model(torch.tensor([p], device="cuda")).logits[0].float() for p in prompts]

    theirs, exact = logits_in(torch.bfloat16), logits_in(torch.float32)
    torch.cuda.empty_cache()
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, gpu_memory_utilization=0.5, max_model_len=2048)
    runner = llm.model_runner
    ours = []
    for prompt in prompts:
        batch = Batch(is_prefill=True, rows=[runner.tables.pad_row], starts=[0], counts=[len(prompt)], samples=[True])
        batch.token_ids = [prompt]
        input_ids, positions, context = runner.prepare_prefill(batch)
        context.slot_mapping.fill_(-1)
        context.want_logits(None)
        ours.append(runner.compute_logits(input_ids, positions, context).float())
    llm.exit()

    def error(logits: list[torch.Tensor]) -> float:
        a, b = torch.cat(logits), torch.cat(exact)
        return ((a - b).norm() / b.norm()).item()

    assert torch.cat(exact).std() >= 1.0
    print(f"relative error: ours {error(ours):.5f}, transformers' {error(theirs):.5f}")
    assert error(ours) <= 1.5 * error(theirs)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_bundled_model_says_the_same_as_on_the_cpu(bundled_model: str, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    questions = ["What is 27 + 58?", "What is 99 + 99?", "Who are you?", "What is the capital of France?"]
    questions += [f"What is {a} + {b}?" for a in (3, 41, 77) for b in (8, 60, 95)]
    cpu = LLM(bundled_model, device="cpu")
    prompts = [
        cpu.tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        for q in questions
    ]
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = [o["token_ids"] for o in cpu.generate(prompts, params, use_tqdm=False)]
    reference = AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32)
    clear = []
    for i, (prompt, completion) in enumerate(zip(prompts, expected, strict=True)):
        ids = cpu.tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + completion[:-1]])).logits[0, len(ids) - 1 :]
        best, second = logits.topk(2).values.unbind(-1)
        if (best - second).min() > (0.5 if dtype == "auto" else 0.01):
            clear.append(i)
    assert len(clear) >= 8, "too few prompts have a clear margin to compare"
    llm = LLM(bundled_model, dtype=dtype, gpu_memory_utilization=0.3)
    actual = [o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)]
    llm.exit()
    cpu.exit()
    assert llm.config.device == "auto"
    assert [actual[i] for i in clear] == [expected[i] for i in clear]


@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 12, 100, 300])
def test_pitfall_60_every_batch_size_has_a_graph(make_llm: Callable[..., LLM], max_num_seqs: int) -> None:
    llm = make_llm(max_num_seqs=max_num_seqs, num_kvcache_blocks=700)
    runner = llm.model_runner
    assert runner.graphs.sizes == graph_sizes(max_num_seqs)
    assert all(runner.graphs.size_for(n) for n in range(1, max_num_seqs + 1))
    # Lengths differ by one, so that the batch shrinks through every size.
    prompts = random_prompts(max_num_seqs, 1, 40)
    params = [SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True) for i in range(max_num_seqs)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(o["token_ids"]) for o in outputs] == [4 + i for i in range(max_num_seqs)]
    report = check_logits(llm, [(p, o["token_ids"]) for p, o in zip(prompts, outputs, strict=True)][-8:])
    assert report.max_error < 0.05


def test_pitfall_61_growing_to_exactly_max_model_len(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=1024)
    prompts = [*random_prompts(2, 500, 500), *random_prompts(1, 1023, 1023)]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(p) + len(o["token_ids"]) for p, o in zip(prompts, outputs, strict=True)] == [1024] * 3
    assert {o["finish_reason"] for o in outputs} == {"length"}
    report = check_logits(llm, [(p, o["token_ids"]) for p, o in zip(prompts, outputs, strict=True)])
    assert report.max_error < 0.05


def test_pitfall_62_eager_with_chunks_prefixes_and_preemption(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(enforce_eager=True, num_kvcache_blocks=24, max_num_batched_tokens=512)
    assert llm.model_runner.graphs is None
    shared = random_prompts(1, 600, 600)[0]
    prompts = [shared + p for p in random_prompts(12, 1, 400, seed=1)]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(o["token_ids"]) for o in outputs] == [200] * 12
    assert llm.scheduler.num_preemptions > 0
    llm.scheduler.check_invariants()
    report = check_logits(llm, [(p, o["token_ids"]) for p, o in zip(prompts, outputs, strict=True)][:4])
    assert report.max_error < 0.05
    llm.exit()
    llm.exit()


HOLD = """
import torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(int(0.3 * total), dtype=torch.uint8, device="cuda")
print("held", flush=True)
input()
"""


def test_pitfall_63_another_process_holds_memory(make_llm: Callable[..., LLM]) -> None:
    torch.cuda.empty_cache()
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        llm = make_llm(gpu_memory_utilization=0.6)
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)[0]["token_ids"]) == 4
        llm.exit()
        with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.25 of .* GiB leaves no room .* more; raise"):
            make_llm(gpu_memory_utilization=0.25)
    finally:
        holder.communicate("\n")


def test_pitfall_64_many_short_prompts_at_high_utilization(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(QWEN3_06B, gpu_memory_utilization=0.97, max_num_seqs=512, max_model_len=4096)
    params = SamplingParams(temperature=0.6, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(random_prompts(512, 1, 1), params, use_tqdm=False)
    assert [len(o["token_ids"]) for o in outputs] == [8] * 512
    free, total = torch.cuda.mem_get_info()
    assert free > 0.01 * total, f"only {free} bytes of the 3 % that are not ours are left"


def test_pitfall_67_nothing_compiles_after_warm_up(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=16)
    llm.generate(random_prompts(16, 300, 300), SamplingParams(max_tokens=4), use_tqdm=False)
    before = num_compiled_kernels()
    assert before > 0
    for num_seqs in (1, 2, 3, 5, 16):
        prompts = random_prompts(num_seqs, 1, 700, seed=num_seqs)
        llm.generate(prompts, SamplingParams(max_tokens=20), use_tqdm=False)
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)  # prefix hits
    assert num_compiled_kernels() == before


def num_compiled_kernels() -> int:
    """Compiled variants of all our Triton kernels on this device."""
    count = 0
    for module_info in pkgutil.iter_modules(nanovllm.kernels.__path__):
        for kernel in vars(import_module(f"nanovllm.kernels.{module_info.name}")).values():
            for per_device in getattr(kernel, "device_caches", {}).values():
                count += len(per_device[0])
    return count


def test_exit_frees_the_gpu_for_the_next_engine(make_llm: Callable[..., LLM]) -> None:
    for _ in range(2):
        llm = make_llm(gpu_memory_utilization=0.9)
        assert llm.model_runner.num_kvcache_blocks > 100
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
        llm.exit()


def skip_without_flash_attn(backend: str) -> None:
    if "flash_attn" in backend:
        reason = FlashAttnBackend.unavailable_reason(torch.device("cuda"), torch.bfloat16, 4, 2, 64, 256)
        if reason is not None:
            pytest.skip(reason)
