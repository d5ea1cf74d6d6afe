"""SamplingParams: defaults and every refusal."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest

from nanovllm.sampling_params import SamplingParams


def test_defaults_are_the_originals():
    params = dataclasses.asdict(SamplingParams())
    assert list(params.items())[:3] == [("temperature", 1.0), ("max_tokens", 64), ("ignore_eos", False)]
    assert params == vars_of_a_plain_request(), "what was added changes nothing unless it is asked for"


def vars_of_a_plain_request() -> dict[str, object]:
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "logit_bias": {}}
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    ends = {"stop": [], "stop_token_ids": [], "min_tokens": 0, "include_stop_str_in_output": False}
    rest = {"seed": None, "logprobs": None, "prompt_logprobs": None, "skip_special_tokens": True}
    plain = {"temperature": 1.0, "max_tokens": 64, "ignore_eos": False}
    return plain | filters | penalties | ends | rest


IMPOSSIBLE = [
    *[("top_k", value) for value in (-2, 1.5)],
    *[("top_p", value) for value in (0, -0.1, 1.01, math.nan)],
    *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
    *[("repetition_penalty", value) for value in (0, -1, 1e7, math.inf, math.nan)],
    *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, math.nan)],
    *[("seed", value) for value in (2**63, -(2**63) - 1, 0.5)],
    *[("min_tokens", value) for value in (-1, 0.5)],
    *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 21, 1.5)],
    ("stop", ""),
    ("stop", ["a", ""]),
]


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_impossible_value_is_refused_with_field_value_and_what_is_possible(field, value):
    with pytest.raises(ValueError, match="must") as caught:
        SamplingParams(**{field: value})
    assert f"{field}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("top_k", -1, -1),
        ("top_k", np.int64(20), 20),
        ("top_p", 1, 1.0),
        ("min_p", np.float32(0.5), 0.5),
        ("seed", -1, None),
        ("seed", -(2**63), -(2**63)),
        ("logprobs", 0, 0),
        ("stop", "end", ["end"]),
        ("stop", ("a", "b"), ["a", "b"]),
        ("stop_token_ids", np.array([3, 5]), [3, 5]),
        ("stop_token_ids", {7}, [7]),
        ("logit_bias", {np.int64(3): 1}, {3: 1.0}),
    ],
)
def test_a_possible_value_is_kept_in_its_plain_form(field, value, kept):
    assert getattr(SamplingParams(**{field: value}), field) == kept


def test_logit_bias_is_bounded_and_named_by_its_id():
    with pytest.raises(ValueError, match=r"logit_bias\[5\]=-101 must be between -100 and 100"):
        SamplingParams(logit_bias={3: 100, 5: -101})


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(ValueError, match="min_tokens=5 must be at most max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500


@pytest.mark.parametrize("params", [SamplingParams(stop_token_ids=[1, 32]), SamplingParams(logit_bias={-1: 0.0})])
def test_an_id_outside_the_vocabulary_is_refused_when_the_vocabulary_is_known(params):
    name, bad = ("stop_token_ids", 32) if params.stop_token_ids else ("logit_bias", -1)
    with pytest.raises(ValueError, match=rf"{name} holds token id {bad}; ids go from 0 to 31"):
        params.check_vocab(32)
    SamplingParams(stop_token_ids=[0, 31], logit_bias={31: 1.0}).check_vocab(32)


@pytest.mark.parametrize(
    ("name", "remedy"), [("n", "repeat the prompt"), ("guided_decoding", "not built in"), ("bad_words", "logit_bias")]
)
def test_a_field_that_only_vllm_has_is_refused_with_what_to_use_instead(name, remedy):
    with pytest.raises(TypeError, match=f"no '{name}'; .*{remedy}"):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5])
def test_pitfall_1_impossible_max_tokens_is_refused_at_construction(max_tokens):
    with pytest.raises(ValueError, match=rf"max_tokens={max_tokens}.*at least 1, or None"):
        SamplingParams(max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [1, 10**9, None])
def test_pitfall_1_possible_max_tokens_is_kept(max_tokens):
    assert SamplingParams(max_tokens=max_tokens).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", True),
        ("max_tokens", "64"),
        ("max_tokens", [64]),
        ("temperature", True),
        ("temperature", False),
        ("temperature", "0.7"),
        ("temperature", None),
        ("temperature", 1j),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("ignore_eos", "false"),
        ("top_k", None),
        ("top_p", "0.9"),
        ("min_p", True),
        ("seed", "7"),
        ("stop", 3),
        ("stop", ["a", 3]),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", [True]),
        ("logit_bias", [(3, 1.0)]),
        ("logit_bias", {3: "1"}),
        ("skip_special_tokens", 0),
        ("include_stop_str_in_output", None),
    ],
)
def test_wrong_type_is_refused_with_field_and_value(field, value):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{field: value})
    assert f"{field}=" in str(caught.value).replace("[3]", "") and "must" in str(caught.value)


@pytest.mark.parametrize("temperature", [-0.001, -1, math.nan, math.inf, -math.inf, np.float32("nan")])
def test_impossible_temperature_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature=.*must be between 0 and"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("temperature", [0, 0.0, 0.6, 2, np.float32(0.5), np.float64(0.6), np.int64(1)])
def test_any_real_temperature_is_taken_and_becomes_a_float(temperature):
    params = SamplingParams(temperature=temperature)
    assert type(params.temperature) is float
    assert params.temperature == temperature


def test_numpy_max_tokens_becomes_an_int():
    params = SamplingParams(max_tokens=np.int64(7))
    assert type(params.max_tokens) is int
    assert params.max_tokens == 7


def test_an_unknown_parameter_and_an_unknown_attribute_are_refused():
    with pytest.raises(TypeError, match="no 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=0.5)
    with pytest.raises(AttributeError):
        SamplingParams().temprature = 0.5


def test_it_pickles():
    params = SamplingParams(temperature=0.3, max_tokens=None, ignore_eos=True, stop="x", logit_bias={1: 2})
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == dataclasses.replace(params) == params
