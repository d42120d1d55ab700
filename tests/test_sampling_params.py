"""SamplingParams: ranges, defaults, and refusals that name field, value and range."""

import math

import pytest

from nanovllm import SamplingParams


@pytest.mark.parametrize(
    "options, text",
    [
        ({"temperature": -0.1}, r"temperature: expected a number in \[0, 10000.0\], got -0.1"),
        ({"temperature": math.nan}, "temperature: .* got nan"),
        ({"temperature": math.inf}, "temperature: .* got inf"),
        ({"temperature": "hot"}, "temperature: .* got 'hot'"),
        ({"temperature": True}, "temperature: .* got True"),
        ({"top_k": -2}, "top_k: expected an integer >= -1, got -2"),
        ({"top_k": 1.0}, "top_k: expected an integer >= -1, got 1.0"),
        ({"top_p": 0}, r"top_p: expected a number in \(0, 1\], got 0"),
        ({"top_p": 1.01}, r"top_p: .* got 1.01"),
        ({"min_p": -0.1}, r"min_p: expected a number in \[0, 1\], got -0.1"),
        ({"max_tokens": 0}, "max_tokens: expected an integer >= 1, got 0"),
        ({"max_tokens": None}, "max_tokens: .* got None"),
        ({"min_tokens": 65}, r"min_tokens: expected an integer in \[0, 64\], got 65"),
        ({"n": 0}, r"n: expected an integer in \[1, 1024\], got 0"),
        ({"repetition_penalty": 0}, r"repetition_penalty: expected a number in \(0, 10000.0\], got 0"),
        ({"presence_penalty": 2.1}, r"presence_penalty: expected a number in \[-2, 2\], got 2.1"),
        ({"frequency_penalty": -3}, r"frequency_penalty: .* got -3"),
        ({"seed": 2**63}, "seed: expected an integer in"),
        ({"seed": 1.5}, "seed: .* got 1.5"),
        ({"logprobs": 21}, r"logprobs: expected an integer in \[0, 20\], got 21"),
        ({"logprobs": -1}, r"logprobs: .* got -1"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: expected an integer >= 0, got -1"),
        ({"stop_token_ids": 5}, "stop_token_ids: expected a list of ids, got 5"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: .* got 'a'"),
        ({"logit_bias": {-1: 0.5}}, "logit_bias: expected an integer >= 0, got -1"),
        ({"logit_bias": {1: math.nan}}, "logit_bias: .* got nan"),
        ({"logit_bias": [1]}, r"logit_bias: expected a dict of id to bias, got \[1\]"),
        ({"stop": ""}, "stop: expected up to 64 non-empty strings, got ''"),
        ({"stop": ["a", ""]}, r"stop: expected up to 64 non-empty strings, got \['a', ''\]"),
        ({"stop": [1]}, r"stop: .* got \[1\]"),
        ({"stop": 5}, "stop: .* got 5"),
        ({"stop": b"ab"}, "stop: .* got b'ab'"),
        ({"stop": ["a"] * 65}, "stop: expected up to 64"),
        ({"ignore_eos": 1}, "ignore_eos: expected True or False, got 1"),
        ({"skip_special_tokens": None}, "skip_special_tokens: expected True or False, got None"),
    ],
)
def test_bad_value_is_refused_by_name(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^SamplingParams\.{text}"):
        SamplingParams(**options)


def test_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1e-6},
        {"top_k": 0},
        {"top_k": 10**12},
        {"top_p": 1},
        {"seed": -(2**63)},
        {"logprobs": 0},
        {"min_tokens": 64},
        {"stop_token_ids": ()},
        {"logit_bias": {}},
    ],
)
def test_limits_are_allowed(options: dict) -> None:
    SamplingParams(**options)


@pytest.mark.parametrize(
    "stop, strings", [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), (("x",), ("x",)), ([], ())]
)
def test_stop_becomes_a_tuple(stop: object, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"logit_bias": {1: 1.0}}, False),
    ],
)
def test_has_penalties(options: dict, expected: bool) -> None:
    assert SamplingParams(**options).has_penalties is expected


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan")])
def test_numbers_beyond_float_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"SamplingParams.temperature: expected a number in \[0, 10000.0\], got"):
        SamplingParams(temperature=value)
    with pytest.raises(ValueError, match=r"SamplingParams\.logit_bias: expected a number in"):
        SamplingParams(logit_bias={1: value})
