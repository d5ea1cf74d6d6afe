"""Two ranks on two GPUs: NCCL, the all-reduce over peer memory, CUDA graphs with both inside, and how ranks fail."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.workers import WorkerError
from nanovllm.kernels import all_reduce as kernel
from nanovllm.utils.dist import Group
from nanovllm.utils.teacher_forcing import check_logits
from tests.recording import engine, greedy
from tests.reference import MIN_GAP, decisive_tokens, random_prompt, reference_generate, story_prompt
from tests.tensor_parallel import faults
from tests.tensor_parallel.faults import Fault
from tests.tensor_parallel.processes import finish, is_alive, shared_memory, start_script, wait_until, workers_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, {torch.cuda.device_count()} visible"),
]

SETTINGS = dict(tensor_parallel_size=2, max_num_seqs=16, skip_tokenizer_init=True, gpu_memory_utilization=0.3)
# Which takes the device from `engine`, whose own default is the CPU.
ON_GPUS = dict(device="cuda", dtype="float32", max_num_seqs=16)
LENGTHS = (1, 30, 100, 255, 256, 257, 600)
MAX_TOKENS = 20
ALL_RANKS = [ranks for ranks in (2, 4) if ranks <= max(torch.cuda.device_count(), 2)]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    names = shared_memory()
    yield
    gc.collect()
    assert wait_until(lambda: not workers_of(os.getpid()), 10)
    assert wait_until(lambda: shared_memory() <= names, 10)


def free_memory(device: int = 0) -> float:
    """GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] / 2**30


# Tokens.


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_bundled_model_says_the_same_on_one_rank_and_on_several(
    bundled_model: str, enforce_eager: bool, ranks: int
) -> None:
    prompts = [story_prompt(length) for length in LENGTHS]
    references = [reference_generate(bundled_model, prompt, MAX_TOKENS) for prompt in prompts]
    prompts = [p for p, r in zip(prompts, references, strict=True) if r.smallest_gap > MIN_GAP]
    expected = [r.token_ids for r in references if r.smallest_gap > MIN_GAP]
    assert len(prompts) >= 4, "too few prompts have a clear margin to compare"
    for size in (1, ranks):
        with engine(bundled_model, tensor_parallel_size=size, enforce_eager=enforce_eager, **ON_GPUS) as (llm, _):
            assert (llm.model_runner.graphs is None) == enforce_eager
            assert greedy(llm, prompts, MAX_TOKENS) == expected, size
            assert greedy(llm, prompts[:1], MAX_TOKENS) == expected[:1], size


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize(
    "model",
    [dict(seed=0), dict(seed=2, attention_bias=True), dict(seed=2, vocab_size=601, tie_word_embeddings=True)],
    ids=["plain", "bias", "odd_vocabulary_tied"],
)
def test_greedy_equals_transformers(tiny_model: Callable[..., str], model: dict[str, object], ranks: int) -> None:
    """With chunks, prefix hits and preemption, as tests/tensor_parallel/test_parity.py does on CPUs."""
    path = tiny_model(std=0.3, **model)
    prompts = [random_prompt(length, model.get("vocab_size", 512)) for length in (1, 30, 255, 256, 257, 600)]
    expected = [decisive_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]
    pool = dict(kvcache_block_size=16, num_kvcache_blocks=40, attention_backend="triton")
    with engine(path, tensor_parallel_size=ranks, **ON_GPUS, **pool) as (llm, log):
        assert greedy(llm, prompts[2:3], MAX_TOKENS) == expected[2:3]
        for overlap in (True, False):
            llm.config.overlap = overlap
            llm.reset_prefix_cache()
            log.clear()
            assert greedy(llm, prompts, MAX_TOKENS) == expected
            assert log.preempted_lengths
            llm.scheduler.max_num_batched_tokens = 200
            assert greedy(llm, prompts[::-1], MAX_TOKENS) == expected[::-1]
            llm.scheduler.max_num_batched_tokens = 16384
            log.clear()
            for _ in range(2):
                assert greedy(llm, prompts[3:4], MAX_TOKENS) == expected[3:4]
            assert log.first_hits[-1] == 240


def test_logits_in_bfloat16_match_the_torch_backend(bundled_model: str) -> None:
    with LLM(bundled_model, **SETTINGS) as llm:
        prompts = [story_prompt(length) for length in LENGTHS]
        outputs = llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=50), use_tqdm=False)
        report = check_logits(llm, [(p, o["token_ids"]) for p, o in zip(prompts, outputs, strict=True)])
        assert report.max_error < 0.05 and report.same_argmax > 0.9
        assert llm.generate(prompts[:2], SamplingParams(max_tokens=5), use_tqdm=False)  # all ranks are in step


# The all-reduce over peer memory.


def part(rank: int, call: int, rows: int, hidden_size: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1000 * call + rank)
    return torch.randn(rows, hidden_size, generator=generator, device=device).bfloat16()


@torch.inference_mode()
def check_all_reduce(runner: ModelRunner) -> None:
    """On every rank: many sums, of which each has to be the same to the bit as the sum in the order of the ranks."""
    group, device, hidden_size = runner.group, runner.device, runner.config.model_config.hidden_size
    inboxes = group._inboxes
    assert inboxes is not None, "no peer memory on this machine"
    plain = Group(group.rank, group.size, group._pg)
    norm = runner.model.model.norm
    rows_of_calls = [1, 207, 3, inboxes.max_rows, 1, 1, 64, inboxes.max_rows, 2] * 20

    def expected(call: int, rows: int) -> torch.Tensor:
        total = torch.zeros(rows, hidden_size, device=device)
        for rank in range(group.size):
            total += part(rank, call, rows, hidden_size, device).float()
        return total.bfloat16()

    for call, rows in enumerate(rows_of_calls):
        x = part(group.rank, call, rows, hidden_size, device)
        assert group._fits_inboxes(x)
        library = plain.all_reduce(x.clone()).float()
        residual = part(99, call, rows, hidden_size, device)
        normed, new_residual = group.all_reduce_norm(x.clone(), residual, norm)
        ours = group.all_reduce(x)
        wanted = expected(call, rows)
        assert torch.equal(ours, wanted), (call, rows)
        torch.testing.assert_close(library, wanted.float(), rtol=2e-2, atol=2e-2)
        assert torch.equal(new_residual, wanted + residual), (call, rows)
        torch.testing.assert_close(normed, norm(wanted, residual)[0], rtol=2e-2, atol=1e-2)

    # In a graph, replayed without a look at the results in between.
    x = torch.empty(64, hidden_size, dtype=torch.bfloat16, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x
        for _ in range(72):
            y = group.all_reduce(y / group.size)
    for call in range(50):
        x.copy_(part(0, call, 64, hidden_size, device))
        graph.replay()
    assert torch.equal(y, part(0, 49, 64, hidden_size, device))
    del graph, y


@pytest.mark.parametrize("ranks", ALL_RANKS)
def test_all_reduce_over_peer_memory(tiny_model: Callable[..., str], ranks: int) -> None:
    path = tiny_model(hidden_size=4096, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    settings = SETTINGS | dict(tensor_parallel_size=ranks, dtype="bfloat16", max_num_seqs=512, enforce_eager=True)
    with LLM(path, **settings) as llm:
        llm._workers.call("apply", check_all_reduce)
        check_all_reduce(llm.model_runner)
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)  # the other ranks raised nothing


def test_without_peer_memory_all_goes_through_nccl(
    bundled_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker's has trouble, rank 0's has none: both do without."""
    faults.replace_main(monkeypatch, main_without_peer_memory)
    prompts = [story_prompt(length) for length in LENGTHS]
    settings = SETTINGS | dict(dtype="float32")
    with LLM(bundled_model, **settings) as llm:
        assert llm.model_runner.group._inboxes is None
        without = greedy(llm, prompts, 1)
    assert "every all-reduce goes through NCCL" in caplog.text
    monkeypatch.undo()
    with LLM(bundled_model, **settings) as llm:
        assert llm.model_runner.group._inboxes is not None
        assert greedy(llm, prompts, 1) == without


def main_without_peer_memory(*args: object) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no peer memory here")

    kernel.inbox_bytes = fail
    faults.real_main(*args)


# Devices and memory.


def test_pitfall_46_only_visible_gpus_count(bundled_model: str, tmp_path: Path) -> None:
    script = "import sys\nfrom nanovllm import LLM\nLLM(sys.argv[1], tensor_parallel_size=2)"
    code, _, err = finish(start_script(tmp_path, script, bundled_model, CUDA_VISIBLE_DEVICES="1"), timeout=60)
    assert code == 1 and "tensor_parallel_size=2 is more than the 1 visible GPUs" in err.splitlines()[-1]


def assert_blocks(runner: ModelRunner, number: int) -> None:
    assert runner.num_kvcache_blocks == runner.kv_cache.shape[2] == number, (runner.num_kvcache_blocks, number)


def test_pitfall_41_the_fuller_gpu_decides_for_both(bundled_model: str) -> None:
    held = torch.empty(20 << 30, dtype=torch.uint8, device="cuda:1")
    settings = SETTINGS | dict(gpu_memory_utilization=0.5)
    with LLM(bundled_model, **settings) as llm:
        fewer = llm.model_runner.num_kvcache_blocks
        llm._workers.call("apply", assert_blocks, fewer)
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    del held
    torch.cuda.empty_cache()
    with LLM(bundled_model, **settings) as llm:
        assert llm.model_runner.num_kvcache_blocks > 1.1 * fewer


def test_pitfall_48_again_and_again_in_one_process(bundled_model: str) -> None:
    """At utilization 0.9, by exit() and by garbage collection; what the first took the second gets."""
    prompts = [story_prompt(30)]
    tokens, free = [], []
    for end in ("exit", "del", "with"):
        llm = LLM(bundled_model, **SETTINGS | dict(gpu_memory_utilization=0.9, dtype="float32"))
        tokens.append(greedy(llm, prompts, 10))
        if end == "exit":
            llm.exit()
            llm.exit()
        if end == "with":
            with llm:
                pass
        del llm
        assert wait_until(lambda: not workers_of(os.getpid()), 10)
        free.append((free_memory(0), free_memory(1)))
    assert tokens[0] == tokens[1] == tokens[2]
    assert max(abs(a - b) for later in free[1:] for a, b in zip(later, free[0], strict=True)) < 1.0, free


def test_two_engines_side_by_side(bundled_model: str) -> None:
    settings = SETTINGS | dict(dtype="float32", num_kvcache_blocks=64)
    prompts = [story_prompt(30), story_prompt(100)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(bundled_model, **settings) as one, LLM(bundled_model, **settings) as two:
        expected = greedy(one, prompts, 12)
        for llm in (one, two):
            for prompt in prompts:
                llm.add_request(prompt, params)
        finished: tuple[list, list] = ([], [])
        while not (one.is_finished() and two.is_finished()):
            for llm, done in zip((one, two), finished, strict=True):
                done += llm.step()[0]
        assert [[ids for _, ids in sorted(done)] for done in finished] == [expected] * 2
        one.exit()
        assert greedy(two, prompts, 12) == expected


# Failures.


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_pitfall_45_a_killed_rank_is_an_error_within_ten_seconds(bundled_model: str, enforce_eager: bool) -> None:
    settings = SETTINGS | dict(gpu_memory_utilization=0.9, dtype="float32", enforce_eager=enforce_eager)
    before = free_memory()
    llm = LLM(bundled_model, **settings)
    expected = greedy(llm, [story_prompt(30)], 10)
    (pid,) = workers_of(os.getpid())
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(2.0, kill)
    timer.start()
    with pytest.raises(WorkerError, match="rank 1 died without a word, exit code -9"):
        while not killed or time.monotonic() < killed[0] + 10:
            greedy(llm, [story_prompt(length) for length in LENGTHS], 500)
    assert time.monotonic() - killed[0] < 10
    with pytest.raises(RuntimeError, match="has exited"):
        greedy(llm, [[1]], 1)
    del llm
    assert wait_until(lambda: free_memory() > before - 2, 10), (before, free_memory())
    with LLM(bundled_model, **settings) as llm:
        assert greedy(llm, [story_prompt(30)], 10) == expected


@pytest.mark.parametrize(
    ("when", "kind"),
    [("connect", "kill"), ("pool", "raise"), ("prefill", "raise"), ("decode", "raise"), ("collective", "kill")],
)
def test_a_fault_in_a_worker_reaches_the_caller(
    bundled_model: str, monkeypatch: pytest.MonkeyPatch, when: str, kind: str
) -> None:
    faults.strike(monkeypatch, Fault(1, when, kind))
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        llm = LLM(bundled_model, **SETTINGS | dict(enforce_eager=True, num_kvcache_blocks=64))
        start = time.monotonic()
        greedy(llm, [story_prompt(30)], 100)
    assert ("struck in " + when if kind == "raise" else "exit code -9") in str(caught.value)
    assert time.monotonic() - start < (60 if when in ("connect", "pool") else 10)
    assert not workers_of(os.getpid())
    caught = None
    monkeypatch.undo()
    with LLM(bundled_model, **SETTINGS | dict(enforce_eager=True, num_kvcache_blocks=64)) as llm:
        assert len(greedy(llm, [story_prompt(30)], 5)[0]) == 5


SCRIPT = """
import os, signal, sys, time
from nanovllm import LLM, SamplingParams
if __name__ == "__main__":
    settings = dict(tensor_parallel_size=2, max_num_seqs=4, num_kvcache_blocks=64, attention_backend="triton")
    llm = LLM(sys.argv[1], skip_tokenizer_init=True, **settings)
    params = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
    llm.add_request([1, 2, 3], params)
    for _ in range(50):
        llm.step()
    print("ready", flush=True)
    while sys.argv[2] == "busy":
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
"""


def test_the_end_of_the_script_is_quiet_and_prompt(bundled_model: str, tmp_path: Path) -> None:
    """With steps in flight."""
    start = time.monotonic()
    code, out, err = finish(start_script(tmp_path, SCRIPT, bundled_model, "end"), timeout=120)
    assert (code, out.split(), err) == (0, ["ready"], "")
    assert time.monotonic() - start < 100


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_pitfall_45_the_end_of_the_parent_is_the_end_of_all(
    bundled_model: str, tmp_path: Path, number: signal.Signals
) -> None:
    names, before = shared_memory(), free_memory(1)
    script = start_script(tmp_path, SCRIPT, bundled_model, "busy")
    assert script.stdout.readline() == "ready\n", script.stderr.read()
    (rank,) = workers_of(script.pid)
    if number == signal.SIGINT:
        os.killpg(script.pid, number)
    else:
        os.kill(script.pid, number)
    assert wait_until(lambda: not is_alive(rank), 10)
    script.communicate(timeout=20)
    assert wait_until(lambda: free_memory(1) > before - 0.5, 10)
    assert wait_until(lambda: shared_memory(script.pid) <= names, 10)
