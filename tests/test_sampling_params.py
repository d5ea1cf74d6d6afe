"""SamplingParams: defaults and every refusal."""

import dataclasses
import math
import pickle

import numpy as np
import pytest

from nanovllm.sampling_params import SamplingParams


def test_defaults_are_the_originals():
    params = SamplingParams()
    assert dataclasses.asdict(params) == {"temperature": 1.0, "max_tokens": 64, "ignore_eos": False}


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
    ],
)
def test_wrong_type_is_refused_with_field_and_value(field, value):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{field: value})
    assert f"{field}={value!r}" in str(caught.value)


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
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)
    with pytest.raises(AttributeError):
        SamplingParams().temprature = 0.5


def test_it_pickles():
    params = SamplingParams(temperature=0.3, max_tokens=None, ignore_eos=True)
    assert pickle.loads(pickle.dumps(params)) == params
