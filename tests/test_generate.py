"""The public API from outside: what generate, add_request, step and exit promise."""

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import StepHandle
from nanovllm.engine.scheduler import Batch
from tests.recording import assert_idle, engine, greedy
from tests.reference import decisive_tokens, random_prompt

MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model(std=0.3)


@pytest.fixture(scope="module")
def cases(path):
    """Prompts and their completions; the first of them in chunks wherever the budget is below 300."""
    prompts = [random_prompt(length) for length in (300, 5, 40, 17)]
    return prompts, [decisive_tokens(path, prompt, MAX_TOKENS) for prompt in prompts]


# ---- generate


def test_one_dict_per_prompt(path, cases):
    prompts, expected = cases
    with engine(path) as (llm, _):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert outputs == [
        {
            "text": "",
            "token_ids": ids,
            "finish_reason": "length",
            "stop_reason": None,
            "prompt": None,
            "prompt_token_ids": prompt,
            "num_cached_tokens": 0,
            "logprobs": None,
            "prompt_logprobs": None,
            "metrics": output["metrics"],
        }
        for prompt, ids, output in zip(prompts, expected, outputs, strict=True)
    ]
    for output in outputs:
        times = output["metrics"]
        assert 0 < times.queue_time < times.time_to_first_token < times.total_time
        assert times.time_per_output_token == pytest.approx(
            (times.total_time - times.time_to_first_token) / (MAX_TOKENS - 1)
        )


def test_max_tokens_defaults_to_64_and_none_fills_max_model_len(path):
    with engine(path, max_model_len=200) as (llm, _):
        params = [SamplingParams(temperature=0), SamplingParams(temperature=0, max_tokens=None)]
        outputs = llm.generate([random_prompt(40)] * 2, params, use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == [64, 160]
        assert outputs[1]["token_ids"][:64] == outputs[0]["token_ids"]


def test_without_a_tokenizer_text_is_refused(path):
    with engine(path) as (llm, _):
        assert llm.tokenizer is None
        with pytest.raises(ValueError, match=r"prompt 1 is text.*skip_tokenizer_init.*token ids"):
            llm.generate([[1, 2], "Hello"], GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            llm.add_request("Hello", GREEDY)


@pytest.mark.parametrize("files", [{}, {"tokenizer_config.json": "{}"}, {"tokenizer.json": "not JSON"}])
def test_a_folder_without_a_tokenizer_says_what_to_do(path, tmp_path, files):
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match="tokenizer.*skip_tokenizer_init=True"):
        LLM(str(tmp_path), device="cpu")


def test_the_progress_bar_counts_prompts_and_shows_both_rates(path, cases, capfd):
    with engine(path) as (llm, _):
        llm.generate(cases[0], GREEDY)
        shown = capfd.readouterr().err
        assert "Generating: 100%" in shown and "4/4" in shown
        prefill, decode = re.findall(r"Prefill=(\d+)tok/s, Decode=(\d+)tok/s", shown)[-1]
        assert int(prefill) > 0 and int(decode) > 0
        llm.generate(cases[0], GREEDY, use_tqdm=False)
        assert capfd.readouterr().err == ""


# ---- add_request and step


@pytest.mark.parametrize("overlap", [False, True])
def test_step_on_an_empty_engine(path, overlap):
    with engine(path, overlap=overlap) as (llm, _):
        for _ in range(2):
            assert llm.step() == ([], 0)
            assert llm.is_finished()
            greedy(llm, [[1, 2, 3]], 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_count_prompt_tokens_up_and_sequences_down(path, cases, overlap):
    prompts, expected = cases
    with engine(path, overlap=overlap, max_num_batched_tokens=256) as (llm, log):
        ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
        assert ids == [0, 1, 2, 3]
        counts, finished = [], []
        while not llm.is_finished():
            done, num_tokens = llm.step()
            finished += done
            counts.append(num_tokens)
        assert dict(finished) == dict(zip(ids, expected, strict=True)) and len(finished) == 4
        assert counts == [sum(step.counts) if step.is_prefill else -len(step.seq_ids) for step in log.steps]
        assert counts[:2] == [256, 300 + 5 + 40 + 17 - 256] and counts[2] == -4
        assert llm.step() == ([], 0)


def test_add_request_refuses_what_generate_refuses(path):
    with engine(path) as (llm, _):
        for prompt, error in (([], ValueError), ([512], ValueError), ([0.5], TypeError), (None, TypeError)):
            with pytest.raises(error, match="prompt 0"):
                llm.add_request(prompt, GREEDY)
        with pytest.raises(TypeError, match="sampling_params is a dict"):
            llm.add_request([1], {"temperature": 0})
        assert llm.is_finished()


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_queued_before_generate_survive_it(path, cases, overlap):
    prompts, expected = cases
    with engine(path, overlap=overlap) as (llm, _):
        short = llm.add_request(prompts[0], SamplingParams(temperature=0, max_tokens=3))  # ends inside generate
        long = llm.add_request(prompts[1], GREEDY)  # outlives it
        (output,) = llm.generate([prompts[2]], SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
        assert output["token_ids"] == expected[2][:10]
        assert not llm.is_finished()
        finished = []
        while not llm.is_finished():
            finished += llm.step()[0]
        assert sorted(finished) == [(short, expected[0][:3]), (long, expected[1])]


def test_a_request_that_ended_inside_generate_is_reported_by_the_next_step(path):
    with engine(path) as (llm, _):
        queued = llm.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
        greedy(llm, [[4, 5, 6]], 9)
        assert not llm.is_finished()
        finished, num_tokens = llm.step()
        assert [seq_id for seq_id, _ in finished] == [queued] and num_tokens == 0
        assert llm.is_finished()


# ---- interrupts and failures


class Broken(StepHandle):
    """A launched step whose result cannot be had."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def wait(self) -> list[int]:
        raise self.error


def break_at(llm: LLM, call: int, where: str, error: type[BaseException]) -> Callable[[], None]:
    """Let the runner's launch number `call` fail, or the wait for it; returns what mends it."""
    launch, count = llm.model_runner.launch, iter(range(1_000))

    def broken_launch(batch: Batch) -> StepHandle:
        if next(count) != call:
            return launch(batch)
        if where == "before":
            raise error
        handle = launch(batch)
        if where == "after":
            raise error
        return Broken(error) if where == "wait" else handle

    llm.model_runner.launch = broken_launch
    return lambda: setattr(llm.model_runner, "launch", launch)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["before", "after", "wait"])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_generate_leaves_nothing_behind(path, cases, overlap, where, error):
    prompts, expected = cases
    # Prompts in chunks, and two sequences at a time, so that some are running, some half-prefilled and some waiting.
    with engine(path, overlap=overlap, max_num_batched_tokens=128, max_num_seqs=2) as (llm, _):
        for call in (0, 1, 2, 3, 4, 8, 22, 23):
            mend = break_at(llm, call, where, error)
            with pytest.raises(error):
                greedy(llm, prompts, MAX_TOKENS)
            mend()
            assert llm.is_finished() and llm.step() == ([], 0)
            assert_idle(llm)
        assert greedy(llm, prompts, MAX_TOKENS) == expected


@pytest.mark.parametrize("where", ["before", "after", "wait"])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_generate_leaves_requests_queued_earlier(path, cases, overlap, where):
    prompts, expected = cases
    with engine(path, overlap=overlap, max_num_batched_tokens=128, max_num_seqs=3) as (llm, _):
        for call in (0, 1, 2, 3, 5, 22):
            queued = [llm.add_request(prompt, GREEDY) for prompt in prompts[:2]]
            mend = break_at(llm, call, where, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                greedy(llm, prompts[2:], MAX_TOKENS)
            mend()
            finished = []
            while not llm.is_finished():
                finished += llm.step()[0]
            assert sorted(finished) == list(zip(queued, expected, strict=False))
            assert_idle(llm)


def interrupt_at(line: int) -> Callable[[FrameType, str, object], object]:
    """A trace function that presses Ctrl-C on reaching so many lines of the engine's book-keeping."""
    lines = iter(range(1, line))

    def trace_line(frame: FrameType, event: str, arg: object) -> object:
        if event == "line" and next(lines, None) is None:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace_line

    books = ("scheduler.py", "block_manager.py", "sequence.py", "row_tables.py", "model_runner.py")
    return lambda frame, event, arg: trace_line if frame.f_code.co_filename.endswith(books) else None


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ctrl_c_anywhere_in_the_books(path, cases, overlap):
    """A real SIGINT on one line after the other: with a block half taken, a token half appended, a row half entered."""
    prompts, expected = cases[0][:0:-1], [ids[:12] for ids in cases[1][:0:-1]]
    settings = {"kvcache_block_size": 16, "num_kvcache_blocks": 5, "max_num_batched_tokens": 24, "max_num_seqs": 2}
    with engine(path, overlap=overlap, **settings) as (llm, _):
        struck, line = 0, 1
        while True:
            sys.settrace(interrupt_at(line))
            try:
                ids = greedy(llm, prompts, 12)
            except KeyboardInterrupt:
                struck += 1
            else:
                break
            finally:
                sys.settrace(None)
            assert_idle(llm)
            line += 131
        assert ids == expected and struck > 20
        assert llm.scheduler.num_preemptions > 0


# ---- engines


def test_two_engines_in_one_process_with_interleaved_calls(path, tiny_model, cases):
    other = tiny_model(std=0.3, seed=2, vocab_size=400, num_hidden_layers=1)
    prompts, expected = cases
    others = [random_prompt(length, 400) for length in (30, 7)]
    others_expected = [decisive_tokens(other, prompt, MAX_TOKENS) for prompt in others]
    with engine(path) as (a, _), engine(other, kvcache_block_size=16) as (b, _):
        ids = [a.add_request(prompts[0], GREEDY), b.add_request(others[0], GREEDY)]
        ids += [a.add_request(prompts[1], GREEDY), b.add_request(others[1], GREEDY)]
        assert ids == [0, 0, 1, 1]  # counted per engine
        finished = {id(a): [], id(b): []}
        while not (a.is_finished() and b.is_finished()):
            for llm in (a, b):
                finished[id(llm)] += llm.step()[0]
        assert sorted(finished[id(a)]) == list(enumerate(expected[:2]))
        assert sorted(finished[id(b)]) == list(enumerate(others_expected))
        for _ in range(2):
            assert greedy(a, prompts, MAX_TOKENS) == expected
            assert greedy(b, others, MAX_TOKENS) == others_expected


def test_exit_twice_and_then_no_more_requests(path):
    with engine(path) as (llm, _):
        greedy(llm, [[1, 2, 3]], 2)
        with engine(path) as (other, _):
            llm.exit()
            llm.exit()
            for use in (lambda: llm.generate([[1]], GREEDY), lambda: llm.add_request([1], GREEDY), llm.step):
                with pytest.raises(RuntimeError, match="exited"):
                    use()
            assert len(greedy(other, [[1, 2, 3]], 2)[0]) == 2


# ---- EOS


@pytest.fixture
def with_eos(tmp_path, tiny_model, bundled_model) -> Callable[..., str]:
    """A copy of a tiny model with the bundled tokenizer, and EOS ids in each of the three places that may name them."""

    def make(generation_config: object, config: object, tokenizer: int | None) -> str:
        shutil.copytree(tiny_model(std=0.3, vocab_size=1024), tmp_path, dirs_exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(bundled_model) / name, tmp_path)
        eos = None if tokenizer is None else AutoTokenizer.from_pretrained(tmp_path).convert_ids_to_tokens(tokenizer)
        edit(tmp_path / "tokenizer_config.json", eos_token=eos)
        edit(tmp_path / "config.json", eos_token_id=config)
        edit(tmp_path / "generation_config.json", eos_token_id=generation_config)
        return str(tmp_path)

    return make


def edit(file: Path, **values: object) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | values))


@pytest.mark.parametrize("place", ["generation_config", "generation_config_list", "config", "tokenizer"])
def test_pitfall_08_every_eos_id_stops(with_eos, tiny_model, place):
    prompt = random_prompt(30, 1024)
    ids = decisive_tokens(tiny_model(std=0.3, vocab_size=1024), prompt, MAX_TOKENS)
    stop = next(i for i in range(8, len(ids)) if ids[i] not in ids[:i])  # a token that comes for the first time
    absent = [i for i in range(20, 30) if i not in ids]
    named = {"generation_config": absent[0], "config": [absent[1]], "tokenizer": absent[2]}
    if place == "generation_config_list":
        named["generation_config"] = [absent[0], ids[stop], absent[3]]
    else:
        named[place] = ids[stop]
    with engine(with_eos(**named), skip_tokenizer_init=False) as (llm, _):
        assert ids[stop] in llm.scheduler.eos_token_ids and len(llm.scheduler.eos_token_ids) >= 3
        ends, runs_on = llm.generate(
            [prompt] * 2,
            [GREEDY, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)],
            use_tqdm=False,
        )
        assert ends["token_ids"] == ids[: stop + 1] and ends["finish_reason"] == "stop"
        assert runs_on["token_ids"] == ids and runs_on["finish_reason"] == "length"


def test_no_eos_anywhere(with_eos):
    with engine(with_eos(None, None, None), skip_tokenizer_init=False) as (llm, _):
        assert llm.scheduler.eos_token_ids == frozenset()
        assert len(greedy(llm, [[1, 2, 3]], 30)[0]) == 30
