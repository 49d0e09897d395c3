"""From prompts to engine requests: forms, limits, truncation, defaults, bad words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.errors import PluginFailure, RequestError
from pegboard.front.prompt_forms import as_prompt
from pegboard.front.prompts import RequestBuilder
from pegboard.interfaces.api import Prompt
from pegboard.plugins.registry import Registry
from pegboard_testing.echo_engine import echo_plan
from pegboard_testing.fake_client import BOS, EOS, ByteTokenizer

BUILDER = RequestBuilder(echo_plan(max_model_len=16), ByteTokenizer())


def build(prompt, **params):
    return BUILDER.build(as_prompt(prompt), SamplingParams(**params), "r")


@pytest.mark.parametrize(
    "prompt",
    [
        "ab",
        [BOS, 97, 98],
        (BOS, 97, 98),
        {"prompt": "ab"},
        {"prompt_token_ids": [BOS, 97, 98], "prompt": "ab"},
        Prompt(text="ab"),
    ],
)
def test_all_forms_mean_the_same(prompt):
    request = build(prompt)
    assert request.prompt_token_ids == [BOS, 97, 98]
    assert as_prompt(prompt).text in ("ab", None)
    assert request.arrival_s > 0


def test_special_tokens_can_be_left_out():
    assert build(Prompt(text="ab", add_special_tokens=False)).prompt_token_ids == [97, 98]


def test_what_rides_along():
    request = BUILDER.build(
        as_prompt({"prompt": "a", "cache_salt": "tenant"}), SamplingParams(), "name", priority=-3
    )
    assert (request.request_id, request.cache_salt, request.priority) == ("name", "tenant", -3)
    assert request.params.eos_token_ids == [EOS]


def test_max_tokens_none_fills_the_model():
    assert build("abc", max_tokens=None).params.max_tokens == 16 - 4
    assert build("abc", max_tokens=5).params.max_tokens == 5


@given(st.integers(1, 40), st.integers(1, 15))
def test_truncation_keeps_the_last_tokens(length, limit):
    token_ids = [number % 256 for number in range(length)]
    assert build(token_ids, truncate_prompt_tokens=limit).prompt_token_ids == token_ids[-limit:]
    assert build(token_ids, truncate_prompt_tokens=-1).prompt_token_ids == token_ids[-15:]


@pytest.mark.parametrize(
    ("prompt", "params", "words", "parameter"),
    [
        ([], {}, "empty", "prompt"),
        (Prompt(text="", add_special_tokens=False), {}, "empty", "prompt"),
        ([1] * 16, {}, "has 16 tokens, but max_model_len is 16", "prompt"),
        ([1, 258], {}, "token id 258 is out of vocabulary", "prompt"),
        ([1, -1], {}, "token id -1 is out of vocabulary", "prompt"),
        ([1, "a"], {}, "integers", "prompt"),
        (3, {}, "got int", "prompt"),
        ({"text": "a"}, {}, "unknown prompt field 'text'", "text"),
        ({}, {}, "text or token ids", "prompt"),
        (Prompt(), {}, "text or token ids", "prompt"),
        (
            {"prompt": "a", "multi_modal_data": {"image": object()}},
            {},
            "text only",
            "multi_modal_data.image[0]",
        ),
        ({"prompt_embeds": [1.0]}, {}, "numpy array.*got list", "prompt_embeds"),
        (
            "a",
            {"truncate_prompt_tokens": 17},
            "over the model's max_model_len",
            "truncate_prompt_tokens",
        ),
        ("a", {"logprobs": 21}, "limit of 20", "logprobs"),
        ("a", {"allowed_token_ids": [258]}, "outside the vocabulary", "allowed_token_ids"),
    ],
)
def test_wrong_requests_name_the_field(prompt, params, words, parameter):
    with pytest.raises(RequestError, match=words) as caught:
        build(prompt, **params)
    assert caught.value.parameter == parameter


class SpaceTokenizer(ByteTokenizer):
    """Encodes " a" as one token, 65. Any other space is a separate token."""

    def encode(self, text, *, add_special_tokens):
        return list(text.replace(" a", "A").encode())


def test_bad_words_are_banned_with_and_without_a_leading_space():
    builder = RequestBuilder(echo_plan(), SpaceTokenizer())
    params = builder.build(as_prompt([1]), SamplingParams(bad_words=["ab", " b"]), "r").params
    # with the space, "ab" starts with another token and keeps its length; " b" would ban the space
    # itself
    assert params.bad_words_token_ids == [[97, 98], [65, 98], [98]]


@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["x"]},
        {"bad_words": ["x"]},
        {"structured_outputs": StructuredOutputsParams(choice=["x"])},
    ],
)
def test_without_a_tokenizer_only_ids_are_served(params):
    builder = RequestBuilder(echo_plan(), None)
    assert builder.build(as_prompt([1, 2]), SamplingParams(), "r").params.eos_token_ids == [EOS]
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        builder.build(as_prompt([1]), SamplingParams(**params), "r")
    with pytest.raises(RequestError, match="token ids only"):
        builder.build(as_prompt("a"), SamplingParams(), "r")


def test_users_params_are_not_changed():
    params = SamplingParams(max_tokens=None, bad_words=["a"])
    BUILDER.build(as_prompt("b"), params, "r")
    assert (
        params.max_tokens is None
        and params.eos_token_ids == []
        and params.bad_words_token_ids == []
    )


def test_prompt_is_passed_through():
    prompt = Prompt(token_ids=[1])
    assert as_prompt(prompt) is prompt


JUDGE = """
from pegboard.interfaces.logits_processor import LogitsProcessorSpec

EVENS = LogitsProcessorSpec(api="1.0", implementation="acme_evens:Evens", validate="acme_evens:even_only")
ANY = LogitsProcessorSpec(api="1.0", implementation="acme_evens:Any")


def even_only(params):
    step = (params.extra_args or {}).get("step", 2)
    return None if step % 2 == 0 else f"step must be even, got {step!r}"
"""  # noqa: E501


NAMING = """
from pegboard.interfaces.logits_processor import LogitsProcessorSpec

SOME = LogitsProcessorSpec(api="1.0", implementation="acme_naming:Some", arguments=("step", "window"))
NONE = LogitsProcessorSpec(api="1.0", implementation="acme_naming:None_", arguments=())
SILENT = LogitsProcessorSpec(api="1.0", implementation="acme_naming:Silent")
"""  # noqa: E501


@pytest.mark.parametrize(
    ("processors", "extra", "told"),
    [
        ([], {"step": 1}, "'step'; none is configured"),
        (["some"], {"step": 1, "window": [1, {"a": None}]}, None),
        (["some", "none"], {"stp": 1}, "'stp'; known: step, window"),
        (["none"], {"step": 1}, "'step'"),
        (["some", "silent"], {"other": 1}, None),
    ],
)
def test_extra_arguments_that_no_processor_reads_are_refused(
    fake_distributions, processors, extra, told
):
    points = {
        "logits_processor": {
            name: f"acme_naming:{name.upper()}" for name in ("some", "none", "silent")
        }
    }
    fake_distributions.add("acme-naming", points, {"acme_naming": NAMING})
    builder = RequestBuilder(
        echo_plan(logits_processors=processors),
        ByteTokenizer(),
        Registry(fake_distributions.scan()),
    )
    builder.build(as_prompt("a"), SamplingParams(), "r")
    if told is None:
        assert (
            builder.build(as_prompt("a"), SamplingParams(extra_args=extra), "r").params.extra_args
            == extra
        )
        return
    with pytest.raises(RequestError, match=told) as caught:
        builder.build(as_prompt("a"), SamplingParams(extra_args=extra), "r")
    assert caught.value.parameter == "extra_args"


def test_logits_processors_judge_the_parameters(fake_distributions):
    points = {"logits_processor": {"evens": "acme_evens:EVENS", "any": "acme_evens:ANY"}}
    fake_distributions.add("acme-evens", points, {"acme_evens": JUDGE})
    plan = echo_plan(logits_processors=["evens", "any"])
    builder = RequestBuilder(plan, ByteTokenizer(), Registry(fake_distributions.scan()))
    for extra in (None, {}, {"step": 4}):
        builder.build(as_prompt("a"), SamplingParams(extra_args=extra), "r")
    with pytest.raises(RequestError, match="evens: step must be even, got 3") as caught:
        builder.build(as_prompt("a"), SamplingParams(extra_args={"step": 3}), "r")
    assert caught.value.parameter == "extra_args"
    with pytest.raises(PluginFailure, match="evens"):
        builder.build(as_prompt("a"), SamplingParams(extra_args={"step": None}), "r")


def test_a_prompt_that_cannot_fit_is_not_tokenized():
    class Refusing(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            raise AssertionError("tokenized")

    builder = RequestBuilder(echo_plan(max_model_len=16), Refusing())
    for prompt in ("a" * (16 * 64 + 1), [1] * 16, ["not looked at"] * 16):
        with pytest.raises(RequestError, match="max_model_len is 16") as caught:
            builder.build(as_prompt(prompt), SamplingParams(), "r")
        assert caught.value.parameter == "prompt"
    assert len(build("a" * 5000, truncate_prompt_tokens=15).prompt_token_ids) == 15, (
        "a text to cut may be longer"
    )
