"""SamplingParams: allowed ranges, normalised values, and errors that name the field."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.data.sampling_params import BeamSearchParams, SamplingParams
from pegboard.errors import RequestError


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("n", [0, -1, 1.5, "2", None, True], [1, 2]),
        ("presence_penalty", [-2.1, 2.1, math.nan, "x", None], [-2, 0, 2]),
        ("frequency_penalty", [-2.5, math.inf], [-2, 0, 2]),
        ("repetition_penalty", [0, -1, math.inf, math.nan], [0.1, 1, 5]),
        ("temperature", [-0.1, math.inf, math.nan, "hot"], [0, 0.5, 2]),
        ("top_p", [0, -1, 1.1, math.nan], [1e-9, 0.5, 1]),
        ("top_k", [-2, 1.5, "5"], [-1, 0, 5, 10**9]),
        ("min_p", [-0.1, 1.1], [0, 0.5, 1]),
        ("seed", [2**63, -(2**63) - 1, 0.5], [None, -5, 0, 2**63 - 1, -(2**63)]),
        ("stop", [[""], ""], [None, "a", ["a", "b"], []]),
        ("stop_token_ids", [["a"], [1.5]], [None, [], [1, 2]]),
        ("max_tokens", [0, -1, 1.5], [None, 1, 10**6]),
        ("min_tokens", [-1, 17, 1.5], [0, 1, 16]),
        ("logprobs", [-2, 0.5, False], [None, -1, 0, 5, True]),
        ("prompt_logprobs", [-2, "3"], [None, -1, 0, 3, True]),
        ("truncate_prompt_tokens", [0, -2, 1.5], [None, -1, 1, 5]),
        ("allowed_token_ids", [[]], [None, [1]]),
        ("bad_words", [[""]], [None, [], ["a b"]]),
    ],
)
def test_ranges(field: str, wrong: list[Any], right: list[Any]) -> None:
    """The default of max_tokens, 16, bounds min_tokens."""
    for value in right:
        SamplingParams(**{field: value})
    for value in wrong:
        with pytest.raises(RequestError, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.parameter == field


def test_a_float_of_numpy_becomes_a_float() -> None:
    params = SamplingParams(temperature=np.float64(0.5), top_p=np.float64(0.25))
    assert (params.temperature, params.top_p) == (0.5, 0.25) and type(params.temperature) is type(
        params.top_p
    ) is float
    with pytest.raises(RequestError, match="top_p"):
        SamplingParams(top_p=np.float64(1.5))


@pytest.mark.parametrize("number", [1, 1.0, np.float64(1), np.float32(1), np.int64(1)])
def test_a_logit_bias_is_any_number_and_a_dict(number: Any) -> None:
    params = SamplingParams(logit_bias={5: number})
    assert params.logit_bias == {5: 1.0} and type(params.logit_bias[5]) is float
    for wrong in (number, [number], {5: "x"}, {5: None}, {5: True}):
        with pytest.raises(RequestError, match="logit_bias") as caught:
            SamplingParams(logit_bias=wrong)
        assert caught.value.parameter == "logit_bias"


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_greedy_completions_would_all_be_the_same() -> None:
    with pytest.raises(RequestError, match="greedy") as caught:
        SamplingParams(temperature=0, n=2)
    assert caught.value.parameter == "n"


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"seed": -1}, {"seed": None}),
        ({"stop": "a"}, {"stop": ["a"]}),
        (
            {},
            {"stop": [], "stop_token_ids": [], "bad_words": [], "skip_reading_prefix_cache": False},
        ),
        (
            {"logprobs": True, "prompt_logprobs": True},
            {"logprobs": 1, "prompt_logprobs": 1, "skip_reading_prefix_cache": True},
        ),
        (
            {"prompt_logprobs": 0, "skip_reading_prefix_cache": False},
            {"skip_reading_prefix_cache": False},
        ),
        ({"temperature": 0.001}, {"temperature": 0.01, "is_greedy": False}),
        (
            {"temperature": 1e-6, "top_p": 0.5},
            {"temperature": 0.01, "top_p": 0.5, "is_greedy": False},
        ),
        (
            {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
            {"top_p": 1, "top_k": 0, "min_p": 0, "is_greedy": True},
        ),
    ],
)
def test_normal_forms(given: dict[str, Any], made: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in made} == made


def test_clones_are_checked_and_leave_the_original_alone() -> None:
    params = SamplingParams(stop="a", seed=3)
    assert params.clone(seed=4).seed == 4 and params.seed == 3 and params.clone().stop == ["a"]
    with pytest.raises(RequestError):
        params.clone(top_p=2)


SCALARS = [
    None,
    True,
    1,
    -1,
    1.5,
    "x",
    "",
    b"x",
    object(),
    1j,
    math.nan,
    10**400,
    2**63,
    np.float64(0.5),
    np.int64(1),
]
KEYS = st.sampled_from([1, "a", "regex"])
ANYTHING = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: (
        st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(KEYS, inner, max_size=2)
    ),
    max_leaves=3,
)


@given(
    made=st.sampled_from(
        [(SamplingParams, {}), (BeamSearchParams, {"beam_width": 1, "max_tokens": 20})]
    ),
    value=ANYTHING,
    data=st.data(),
)
def test_a_wrong_type_is_refused_and_everything_else_can_be_sent(
    made: Any, value: Any, data: st.DataObject
) -> None:
    """What is accepted reaches the engine unchanged."""
    kind, needed = made
    # its values may be anything
    names = [field.name for field in msgspec.structs.fields(kind) if field.name != "extra_args"]
    name = data.draw(st.sampled_from(names))
    try:
        params = kind(**{**needed, name: value})
        if kind is SamplingParams:
            params.check_against_model(vocab_size=100, max_logprobs=-1)
    except RequestError as error:
        assert error.parameter == name or (name, error.parameter) in [
            ("max_tokens", "min_tokens"),
            ("detokenize", "stop"),
        ]
        return
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=kind)
    assert sent == params


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n has a wrong value: expected `int` at least 1, got 0"),
        ({"top_p": 1.5}, "top_p has a wrong value: expected `float` at most 1.0, got 1.5"),
        ({"temperature": 10**400}, "temperature has a wrong value: number out of range, got 1000"),
        ({"stop": [1]}, "stop has a wrong type: expected `str`, got `int`, got \\[1\\]"),
        ({"stop": 1}, "stop has a wrong type"),
        ({"bad_words": "word"}, "bad_words has a wrong type"),
        ({"logit_bias": {"a": 1}}, "logit_bias has a wrong type"),
        ({"logit_bias": {1: "x"}}, "logit_bias has a wrong type"),
        ({"ignore_eos": "false"}, "ignore_eos has a wrong type"),
        ({"extra_args": {1: 2}}, "extra_args has a wrong type"),
        (
            {"structured_outputs": {"regexp": "a"}},
            "structured_outputs has a wrong value: object contains unknown field",
        ),
    ],
)
def test_the_message_of_a_wrong_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(TypeError, match="logits_processors"):
        SamplingParams(logits_processors=[])  # type: ignore[call-arg]


@given(
    vocab_size=st.integers(1, 50),
    token=st.integers(-3, 60),
    field=st.sampled_from(["allowed_token_ids", "logit_bias", "stop_token_ids"]),
)
def test_token_ids_are_in_the_vocabulary(vocab_size: int, token: int, field: str) -> None:
    params = SamplingParams(**{field: {token: 1.0} if field == "logit_bias" else [token]})
    if 0 <= token < vocab_size:
        params.check_against_model(vocab_size=vocab_size, max_logprobs=20)
        return
    with pytest.raises(RequestError, match=str(token)) as caught:
        params.check_against_model(vocab_size=vocab_size, max_logprobs=20)
    assert caught.value.parameter == field


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_limited(field: str) -> None:
    """-1 asks for the whole vocabulary. A limit of -1 means no limit."""
    for asked, limit, fits in [
        (20, 20, True),
        (21, 20, False),
        (-1, 20, False),
        (-1, 100, True),
        (-1, -1, True),
        (99, -1, True),
    ]:
        params = SamplingParams(**{field: asked})
        if fits:
            params.check_against_model(vocab_size=100, max_logprobs=limit)
        else:
            with pytest.raises(RequestError, match="max-logprobs"):
                params.check_against_model(vocab_size=100, max_logprobs=limit)
