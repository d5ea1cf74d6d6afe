"""Inputs that broke engines of this kind, before a step is computed. The numbers are those of the project's list."""

import io
import sys
from time import perf_counter

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from tests.recording import CLEAR, answers, assert_idle, engine, greedy
from tests.reference import decisive_tokens, random_prompt

MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
GOOD = [random_prompt(length) for length in (5, 40)]


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model(std=0.3)


@pytest.fixture(scope="module")
def expected(path):
    """Completions of the GOOD prompts."""
    return [decisive_tokens(path, prompt, MAX_TOKENS) for prompt in GOOD]


def assert_refused(llm: LLM, expected: list[list[int]], prompts: object, error: type[Exception], match: str) -> None:
    """The call fails with this error, queues nothing, and a good call afterwards is right."""
    with pytest.raises(error, match=match):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert llm.step() == ([], 0)
    assert greedy(llm, GOOD, MAX_TOKENS) == expected


@pytest.mark.parametrize("empty", [[], (), np.array([], dtype=np.int64)])
def test_pitfall_02_no_token_ids(path, expected, empty):
    with engine(path) as (llm, _):
        assert_refused(llm, expected, [empty], ValueError, "prompt 0 is empty")
        assert_refused(llm, expected, [[1], [2], empty, [3]], ValueError, "prompt 2 is empty")


def test_pitfall_02_empty_text(bundled_model):
    with engine(bundled_model, skip_tokenizer_init=False) as (llm, _):
        for prompts, index in ("", 0), ([""], 0), (["a", "b", ""], 2):
            with pytest.raises(ValueError, match=f"prompt {index} is empty"):
                llm.generate(prompts, GREEDY, use_tqdm=False)
            assert_idle(llm)
        assert llm.generate("Once", GREEDY, use_tqdm=False)[0]["text"].startswith(" upon a time")


def test_pitfall_03_prompts_around_max_model_len(path, expected):
    with engine(path, max_model_len=512) as (llm, _):
        for length in (513, 512):  # 512 leaves no room for one new token
            prompts = [GOOD[0], random_prompt(length)]
            assert_refused(llm, expected, prompts, ValueError, rf"prompt 1 has {length} tokens.*max_model_len=512")
        prompts = [random_prompt(length) for length in (500, 511)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == [12, 1]
        assert [output["finish_reason"] for output in outputs] == ["length"] * 2
        assert outputs[0]["token_ids"] == decisive_tokens(path, prompts[0], 12)


def test_pitfall_04_one_bad_prompt_among_a_thousand(path, expected):
    prompts = [random_prompt(3, seed=i) for i in range(1000)]
    with engine(path) as (llm, log):
        for bad in (0, 500, 999):
            with pytest.raises(ValueError, match=f"prompt {bad} is empty"):
                llm.generate([*prompts[:bad], [], *prompts[bad:]], GREEDY, use_tqdm=False)
        assert not log.seqs, "a prompt was queued although another one of its call was refused"
        assert_refused(llm, expected, [*prompts, "text"], ValueError, "prompt 1000 is text")


def test_pitfall_05_prompts_and_parameters_differ_in_number(path, expected):
    with engine(path) as (llm, _):
        with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
            llm.generate([[1], [2], [3]], [GREEDY] * 2, use_tqdm=False)
        with pytest.raises(ValueError, match="0 prompts and 1 sampling_params"):
            llm.generate([], [GREEDY], use_tqdm=False)
        with pytest.raises(TypeError, match=r"sampling_params\[1\] is a dict"):
            llm.generate([[1], [2]], [GREEDY, {"temperature": 0}], use_tqdm=False)
        assert_idle(llm)
        short = SamplingParams(temperature=0, max_tokens=3)
        outputs = llm.generate(GOOD, [GREEDY, short], use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == [expected[0], expected[1][:3]]


def test_pitfall_06_one_prompt_and_none(path, expected, bundled_model):
    with engine(path) as (llm, log):
        for prompt in (GOOD[0], tuple(GOOD[0]), np.array(GOOD[0]), [np.int32(i) for i in GOOD[0]]):
            (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert output["token_ids"] == expected[0]
        assert llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0]["finish_reason"] == "length"
        log.clear()
        assert llm.generate([], GREEDY, use_tqdm=False) == []
        assert llm.generate([], [], use_tqdm=False) == []
        assert not log.steps
    with engine(bundled_model, skip_tokenizer_init=False) as (llm, _):
        (alone,) = answers(llm.generate("Hello", GREEDY, use_tqdm=False))
        ids = llm.tokenizer("Hello")["input_ids"]
        assert answers(llm.generate(["Hello", ids], GREEDY, use_tqdm=False)) == [alone, alone]


@pytest.mark.parametrize("bad", [10**6, 512, -1, 2**63, 10**30])
def test_pitfall_07_token_ids_outside_the_vocabulary(path, expected, bad):
    with engine(path) as (llm, _):
        assert_refused(llm, expected, [GOOD[0], [1, bad, 2]], ValueError, rf"prompt 1 holds token id {bad};.* 0 to 511")
        assert len(greedy(llm, [[0, 511]], 1)) == 1


@pytest.mark.parametrize(
    "prompts",
    [None, 5, b"text", {"input_ids": [1]}, [5.0], [None], [[1, [2]]], [[1], [[2], [3]]], [[0.5]], [[True]], [["a"]]],
)
def test_prompts_of_the_wrong_type(path, expected, prompts):
    with engine(path) as (llm, _):
        assert_refused(llm, expected, prompts, TypeError, r"prompts is a|prompt \d (is a|must be)")


class Watched(io.StringIO):
    """A standard error stream that knows when each part was written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.writes.append((perf_counter(), text))
        return len(text)


def test_pitfall_12_ten_thousand_strings_show_progress_at_once(bundled_model, monkeypatch):
    prompts = [f"Tell me a story about {i} foxes, {'and an owl, ' * (i % 10)}please." for i in range(10_000)]
    with engine(bundled_model, skip_tokenizer_init=False) as (llm, log):

        def interrupt(batch: object) -> None:
            raise KeyboardInterrupt

        llm.model_runner.launch = interrupt  # what follows the tokenizing takes its time
        stream = Watched()
        monkeypatch.setattr(sys, "stderr", stream)
        start = perf_counter()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY)
        end = perf_counter()
        monkeypatch.undo()
        assert len(log.seqs) == 10_000
    shown = [time - start for time, text in stream.writes if "Tokenizing" in text]
    assert shown[0] < 1
    # It moves: no second goes by without news, and it has counted before all were tokenized.
    assert max(b - a for a, b in zip(shown, [*shown[1:], end - start], strict=True)) < 1
    counts = [text.split("/10000")[0].split()[-1] for _, text in stream.writes if "/10000" in text]
    assert any(0 < int(count) < 10_000 for count in counts)


def test_pitfall_13_five_calls_in_a_row(path):
    with engine(path, max_num_seqs=8, max_num_batched_tokens=64) as (llm, _):
        alone = {}
        for call, size in enumerate((1, 20, 3, 50, 7)):
            prompts = [random_prompt(1 + (7 * i + call) % 60, seed=i) for i in range(size)]
            params = [SamplingParams(temperature=0, max_tokens=1 + i % 5) for i in range(size)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [len(output["token_ids"]) for output in outputs] == [1 + i % 5 for i in range(size)]
            assert_idle(llm)
            for prompt, output in zip(prompts, outputs, strict=True):
                alone[tuple(prompt)] = output["token_ids"]
    with engine(path, max_num_seqs=1, enable_prefix_caching=False) as (llm, log):
        for prompt, ids in alone.items():
            assert greedy(llm, [list(prompt)], 5)[0][: len(ids)] == ids
        assert min(log.gaps) > CLEAR
