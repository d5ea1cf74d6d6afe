"""Faults that were found by trying to break the engine. Each stays here with the right behaviour."""

import json
import shutil
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.engine.outputs import Request
from tests.recording import answers

GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPTS = [[i, i + 1, 2 * i] * (3 + 4 * i) for i in range(1, 8)]


def build(path: str, **kwargs: object) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "kvcache_block_size": 16, "num_kvcache_blocks": 64}
    return LLM(path, **(defaults | {"max_model_len": 256} | kwargs))


def test_two_engines_compute_side_by_side_in_two_threads(tiny_model: Callable[..., str]) -> None:
    engines = [build(tiny_model()), build(tiny_model())]
    expected = answers(engines[0].generate(PROMPTS, GREEDY, use_tqdm=False))
    results: list[object] = []

    def run(llm: LLM) -> None:
        for _ in range(6):
            try:
                results.append(answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected)
            except Exception as error:
                results.append(error)

    threads = [threading.Thread(target=run, args=(llm,)) for llm in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 12


def test_one_engine_refuses_a_second_thread(tiny_model: Callable[..., str]) -> None:
    llm = build(tiny_model())
    launch, errors = llm.model_runner.launch, []

    def ask_meanwhile(batch: object) -> object:
        def ask() -> None:
            try:
                llm.add_request([1], GREEDY)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return launch(batch)

    llm.model_runner.launch = ask_meanwhile
    (output,) = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert output["finish_reason"] == "length"
    assert errors
    assert all("in use by another thread" in error for error in errors)
    assert llm.is_finished()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("method", ["launch", "schedule", "postprocess"])
@pytest.mark.parametrize("from_thread", [True, False], ids=["other thread", "signal handler"])
def test_exit_in_the_middle_of_a_step_takes_effect_at_its_end(
    tiny_model: Callable[..., str], overlap: bool, method: str, from_thread: bool
) -> None:
    llm = build(tiny_model(), overlap=overlap)
    owner = llm.model_runner if method == "launch" else llm.scheduler
    plain, threads, num_calls = getattr(owner, method), [], 0

    def exit_in_the_fourth(*args: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            if from_thread:
                threads.append(threading.Thread(target=llm.exit))
                threads[0].start()
                threads[0].join(0.05)  # it waits for the step
            else:
                llm.exit()
        return plain(*args)

    setattr(owner, method, exit_in_the_fourth)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=50), use_tqdm=False)
    assert {output["finish_reason"] for output in outputs} == {"abort"}
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert llm.model_runner is None
    assert llm.is_finished()
    assert not llm.scheduler.block_manager.used_block_ids
    with pytest.raises(RuntimeError, match="this engine has exited; build a new LLM"):
        llm.generate(PROMPTS, GREEDY)


def test_exit_does_not_wait_for_a_lock_that_an_interrupt_left_behind(tiny_model: Callable[..., str]) -> None:
    llm = build(tiny_model())
    llm._lock.acquire()
    thread = threading.Thread(target=llm.exit)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert llm.model_runner is None


def test_the_end_of_a_with_block_keeps_its_error_while_another_thread_generates(
    tiny_model: Callable[..., str],
) -> None:
    reasons = []

    def generate() -> None:
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        for _ in range(50):
            try:
                reasons.extend(output["finish_reason"] for output in llm.generate(PROMPTS, params, use_tqdm=False))
            except RuntimeError as error:
                reasons.append(str(error))
                return

    with pytest.raises(ZeroDivisionError), build(tiny_model()) as llm:  # noqa: PT012
        thread = threading.Thread(target=generate)
        thread.start()
        time.sleep(0.1)
        1 / 0  # noqa: B018
    assert llm.model_runner is None
    thread.join(10)
    assert "this engine has exited; build a new LLM" in reasons[-1]
    assert set(reasons[:-1]) <= {"length", "abort"}


def test_a_failure_while_committing_leaves_a_usable_engine(tiny_model: Callable[..., str]) -> None:
    llm = build(tiny_model(), num_kvcache_blocks=17)
    expected = answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    postprocess = llm.scheduler.postprocess
    waiting = llm.add_request([5, 6, 7], GREEDY)

    def fail(*_: object) -> None:
        raise KeyError("committing")

    llm.scheduler.postprocess = fail
    with pytest.raises(KeyError):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.scheduler.postprocess = postprocess
    llm.scheduler.check_invariants()
    assert answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    finished = llm.step()[0]
    assert [request for request, _ in finished] == [waiting]
    assert llm.is_finished()


@pytest.mark.parametrize("ends", [False, True])
def test_a_failure_behind_the_commit_leaves_a_usable_engine(
    tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """A tokenizer that fails once, while a request goes on and with its last token."""
    llm = build(tiny_model())
    follow = Request.follow

    def fail(request: Request) -> str | None:
        if request.seq.is_finished is ends:
            monkeypatch.setattr(Request, "follow", follow)
            raise KeyError("decoding")
        return follow(request)

    monkeypatch.setattr(Request, "follow", fail)
    with pytest.raises(KeyError):
        list(llm.stream([[1, 2], [3]], GREEDY))
    assert llm.is_finished()
    assert not llm.abort(0) and not llm.abort(1)
    assert llm.stats().num_finished + llm.stats().num_aborted == 2


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 0), ("max_tokens", "7"), ("temperature", -1.0), ("ignore_eos", "no")]
)
def test_parameters_are_checked_again_when_used(tiny_model: Callable[..., str], field: str, value: object) -> None:
    llm = build(tiny_model())
    params = SamplingParams(temperature=0, max_tokens=3)
    setattr(params, field, value)
    with pytest.raises((ValueError, TypeError), match=field):
        llm.generate([[1, 2], [3]], [GREEDY, params], use_tqdm=False)
    with pytest.raises((ValueError, TypeError), match=field):
        llm.add_request([1], params)
    assert llm.is_finished()


def test_the_largest_temperature_is_uniform_and_a_larger_one_refused(tiny_model: Callable[..., str]) -> None:
    llm = build(tiny_model(vocab_size=64), seed=0)
    hot = SamplingParams(temperature=1e6, max_tokens=100, ignore_eos=True)
    counts = Counter(token for o in llm.generate([[1]] * 20, hot, use_tqdm=False) for token in o["token_ids"])
    assert len(counts) == 64
    assert max(counts.values()) < 3 * 2000 / 64
    for too_hot in (1e7, 1e39, 10**400):
        with pytest.raises(ValueError, match="between 0 and 1e"):
            SamplingParams(temperature=too_hot)


@pytest.mark.parametrize(
    "prompt",
    [[1, True, 5], [np.bool_(True), 2], np.array([True, False]), np.array([1.0, 2.0]), [1, None], [[1, [2]]], [1, "2"]],
)
def test_only_integers_are_token_ids(tiny_model: Callable[..., str], prompt: object) -> None:
    llm = build(tiny_model())
    with pytest.raises(TypeError, match=r"prompt 1 must be a flat list of integer token ids"):
        llm.generate([[1, 2], prompt], GREEDY, use_tqdm=False)
    assert llm.is_finished()


def test_any_integers_are_token_ids(tiny_model: Callable[..., str]) -> None:
    llm = build(tiny_model())
    same = [[1, 2, 3], (1, 2, 3), range(1, 4), array("i", [1, 2, 3]), [np.int32(1), 2, np.uint8(3)]]
    same += [np.array([1, 2, 3]), np.array([1, 2, 3], dtype=object), torch.tensor([1, 2, 3])]
    outputs = answers(llm.generate(same, GREEDY, use_tqdm=False))
    assert all(output == outputs[0] for output in outputs)
    with pytest.raises(ValueError, match=f"token id {2**70}"):
        llm.generate([[np.int64(1), 2**70]], GREEDY, use_tqdm=False)
    with pytest.raises(TypeError, match="single number"):
        llm.generate(np.array(5), GREEDY, use_tqdm=False)


def test_text_and_conversations_that_cannot_be_honoured_name_the_prompt(bundled_model: str) -> None:
    llm = LLM(bundled_model, device="cpu", num_kvcache_blocks=16)
    with pytest.raises(ValueError, match="prompt 1 is no valid text"):
        llm.generate(["fine", "a\ud800b"], GREEDY, use_tqdm=False)
    with pytest.raises(TypeError, match="prompt 0 is a conversation.*apply_chat_template"):
        llm.generate([[{"role": "user", "content": "Hello!"}]], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_integers_are_no_weights(tiny_model: Callable[..., str], tmp_path: Path, dtype: torch.dtype) -> None:
    shutil.copytree(tiny_model(), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(weights | {name: (weights[name] * 10).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}.*unquantized"):
        build(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", "Qwen3ForCausalLM"),
        ("architectures", {"a": 1}),
        ("architectures", 5),
        ("quantization_config", "int4"),
        ("rope_parameters", "linear"),
        ("rope_scaling", ["linear"]),
        ("layer_types", 5),
        ("rms_norm_eps", 10**400),
    ],
)
def test_a_malformed_config_names_the_file(
    tiny_model: Callable[..., str], tmp_path: Path, key: str, value: object
) -> None:
    config = json.loads((Path(tiny_model()) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=r"config\.json"):
        build(str(tmp_path))


def test_a_scalar_where_a_vector_belongs_names_the_tensor(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    shutil.copytree(tiny_model(), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        build(str(tmp_path))


def test_the_remedy_for_a_long_prompt_fits_its_cause(tiny_model: Callable[..., str]) -> None:
    path = tiny_model(max_position_embeddings=128)
    causes = {
        "all that the model can do": build(path, max_model_len=4096),
        "raise max_model_len": build(path, max_model_len=100),
        "raise num_kvcache_blocks": build(path, max_model_len=100, num_kvcache_blocks=4),
    }
    for remedy, llm in causes.items():
        with pytest.raises(ValueError, match=remedy):
            llm.generate([[1] * 200], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("field", "value"), [("num_kvcache_blocks", 2**40), ("kvcache_block_size", 2**40), ("max_num_seqs", 10**30)]
)
def test_values_beyond_all_memory_are_refused_by_name(tiny_model: Callable[..., str], field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}.*must be between"):
        build(tiny_model(), **{field: value})


def test_a_pool_that_does_not_fit_says_how_much_it_needs(tiny_model: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match="num_kvcache_blocks=2147483647 of 1048576 tokens need .* GiB"):
        build(tiny_model(), num_kvcache_blocks=2**31 - 1, kvcache_block_size=1 << 20)


def test_the_users_default_device_is_not_ours(tiny_model: Callable[..., str]) -> None:
    llm = build(tiny_model())
    expected = answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    llm.reset_prefix_cache()
    torch.set_default_device("meta")
    try:
        actual = answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    finally:
        torch.set_default_device(None)
    assert actual == expected
