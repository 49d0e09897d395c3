"""The limits of request bodies: what is refused, with which words, and that nothing grows before it
is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.errors import RequestError
from pegboard.interfaces.tokenizer import Chat
from pegboard_chat import ChatTemplate
from pegboard_chat import request_limits as limits
from pegboard_chat.chat_template import plain_value
from pegboard_chat.limited_template import LimitedTemplates
from pegboard_chat.openai_format import read_messages
from pegboard_chat.request_body import decode_body, parse_body
from pegboard_chat.request_limits import (
    MAX_DEPTH,
    MAX_ITEMS,
    PromptLimit,
    check_counts,
    check_depth,
)
from pegboard_chat.sampling_fields import SamplingFields
from pegboard_testing.fake_client import FakeEngineClient

USER = [{"role": "user", "content": "hi"}]


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


TEXTS = st.text('a"\\{[,', max_size=9)


@given(
    st.recursive(st.none() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))
)
def test_values_are_counted_and_their_look_alikes_in_strings_are_not(value):
    def count(part: Any) -> tuple[int, int]:
        inner = (
            list(part.values())
            if isinstance(part, dict)
            else part
            if isinstance(part, list)
            else []
        )
        own = (
            len(part) if isinstance(part, dict) else int(isinstance(part, str)),
            int(isinstance(part, dict | list)),
        )
        sums = [count(item) for item in inner]
        return own[0] + sum(item[0] for item in sums), own[1] + sum(item[1] for item in sums)

    num_strings, num_containers = count(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "COUNTED_FROM", 0)
        patch.setattr(limits, "SLICE", 5)
        patch.setattr(limits, "MAX_STRINGS", num_strings)
        patch.setattr(limits, "MAX_CONTAINERS", num_containers)
        body = json.dumps(value, ensure_ascii=False).encode()
        check_counts(body)
        for name, num in (("MAX_STRINGS", num_strings), ("MAX_CONTAINERS", num_containers)):
            if num:
                patch.setattr(limits, name, num - 1)
                with pytest.raises(RequestError, match="the most that a request may have"):
                    check_counts(body)
                patch.setattr(limits, name, num)


def test_depth_is_refused_before_anything_walks_the_value():
    assert decode_body(json.dumps({"a": nested(MAX_DEPTH)}).encode())
    for depth in (MAX_DEPTH + 1, 800, 20_000):
        body = b'{"chat_template_kwargs":' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(RequestError, match="nested deeper than 128 levels"):
            decode_body(body)
    check_depth(nested(MAX_DEPTH), "x")
    with pytest.raises(RequestError, match="x is nested deeper"):
        check_depth(nested(MAX_DEPTH + 1), "x")


def test_depth_within_json_text_is_refused():
    call = {"function": {"name": "f", "arguments": json.dumps({"a": nested(400)})}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(RequestError, match="arguments is nested deeper"):
        read_messages([message])
    with pytest.raises(RequestError, match="nested deeper"):
        ChatTemplate("{{ messages }}", {}).render(Chat(messages=[message]))
    with pytest.raises(RequestError, match="nested deeper"):
        plain_value(nested(800))


@pytest.mark.parametrize("name", sorted(MAX_ITEMS.keys() & SamplingFields.model_fields.keys()))
def test_every_list_has_a_limit_that_the_error_names(name):
    most, most_chars = MAX_ITEMS[name]
    items: Any = (
        {str(number): 1.0 for number in range(most + 1)}
        if name in ("logit_bias", "metadata")
        else [1] * (most + 1)
    )
    with pytest.raises(
        RequestError, match=f"{name} has {most + 1} items; at most {most} are allowed"
    ) as caught:
        parse_body(json.dumps({name: items}).encode(), SamplingFields)
    assert caught.value.parameter == name
    if most_chars is not None:
        for value in ("a" * (most_chars + 1), ["a" * most_chars, "b"]):
            with pytest.raises(
                RequestError,
                match=f"{name} has {most_chars + 1} characters; at most {most_chars} are allowed",
            ):
                parse_body(json.dumps({name: value}).encode(), SamplingFields)


def test_errors_repeat_only_the_beginning_of_what_was_sent():
    for body in (
        {"x" * 10**6: 1},
        {"stop": [1, "x" * 9]},
        {"temperature": "x" * 10**6},
        {"metadata": {"y" * 10**6: 1}},
    ):
        with pytest.raises(RequestError) as caught:
            parse_body(json.dumps(body).encode(), SamplingFields)
        assert len(str(caught.value)) < 500 and len(caught.value.parameter) < 300


def test_a_text_that_cannot_fit_is_not_tokenized():
    limit = PromptLimit(FakeEngineClient(max_model_len=10))
    limit.check("a" * limit.max_chars)
    with pytest.raises(RequestError, match="more than fit into max_model_len"):
        limit.check("a" * (limit.max_chars + 1))


# --- templates ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited():
    templates = LimitedTemplates(limit_s=2.0)
    yield templates
    templates.close()


def render(limited: LimitedTemplates, source: str, **more: Any) -> str:
    text, _ = limited.render(
        source, {"bos_token": "<s>"}, {"messages": USER, "max_chars": 100_000, **more}
    )
    return text


def test_a_template_of_a_request_is_rendered(limited):
    assert render(limited, "{{ bos_token }}{{ messages[0].content }}ü\n") == "<s>hiü"
    with pytest.raises(RequestError, match="no") as caught:
        render(limited, "{{ raise_exception('no') }}")
    assert caught.value.parameter == "messages"


HUGE = [
    "{{ 10 ** 5000 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'a' * 10 ** 10 }}",
    "{% set n = 10 ** 10 %}{{ messages[0].content * n }}",
    "{{ messages[0].content.center(10 ** 10) }}",
    "{{ '%999999999s' % 'a' }}",
    "{{ messages[0].content.ljust(999999999).replace(' ', 'aaaa') }}",
    "{{ lipsum(n=100000) }}",
    "{{ '(' * 100000 }}{{ range(10 ** 9) | list }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    (
        "{% set ns = namespace(x=['a']) %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% "
        "endfor %}{{ ns.x }}"
    ),
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ [1] * 10 ** 9 }}",
    "{{ '%s' | format('a' * 10 ** 9) }}",
]


@pytest.mark.parametrize("source", HUGE, ids=range(len(HUGE)))
def test_a_template_without_end_is_that_requests_error(limited, source):
    with pytest.raises(RequestError) as caught:
        render(limited, source)
    assert caught.value.parameter in ("messages", "chat_template")
    assert render(limited, "{{ messages[0].content }}") == "hi", "the next template is rendered"


def test_a_user_of_the_library_renders_in_the_users_process(monkeypatch):
    monkeypatch.setattr(
        "pegboard_chat.chat_template._limited", lambda **_: pytest.fail("a limited process")
    )
    template = ChatTemplate({"default": "d", "rag": "r"}, {})
    assert template.render(Chat(messages=USER, chat_template="own")) == "own"
    assert template.render(Chat(messages=USER, chat_template="rag")) == "r"


@pytest.fixture
def short(monkeypatch):
    """A server's processes for templates, with a limit of half a second. name: whether the template
    came with the request."""
    made = {
        given: LimitedTemplates(0.5, "chat_template" if given else "messages")
        for given in (True, False)
    }
    monkeypatch.setattr("pegboard_chat.chat_template._limited", lambda *, is_given: made[is_given])
    yield made
    for templates in made.values():
        templates.close()


def test_a_template_of_a_checkpoint_has_the_same_limits(short, caplog):
    chat = Chat(messages=USER, max_chars=9)
    with pytest.raises(RequestError, match="the chat template took over") as caught:
        ChatTemplate("{{ [1] | slice(9999999999) | list }}", {}).render(chat)
    assert caught.value.parameter == "messages" and short[True]._process is None
    with pytest.raises(RequestError, match="more than fit into max_model_len"):
        ChatTemplate("{{ messages[0].content * 9 }}", {}).render(chat)
    caplog.clear()
    assert (
        ChatTemplate({"default": "d", "rag": "{# limited #}r"}, {}).render(
            replace(chat, chat_template="rag", tools=[{}])
        )
        == "r"
    )
    assert "has no place for tools" in caplog.text


def test_a_chat_that_is_not_json_is_refused(short):
    with pytest.raises(RequestError, match="cannot be rendered"):
        ChatTemplate("{{ extra }}", {}).render(
            Chat(messages=USER, template_kwargs={"extra": 10**5000}, max_chars=9)
        )


HOSTILE = [
    10**300,
    -(10**4299),
    10**5000,
    1e308,
    "\udc80",
    nested(100),
    {"__class__": 1},
    [[]] * 1000,
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_arguments_of_a_template_are_request_errors_or_text(value):
    source = (
        "{{ extra }}{{ extra | tojson }}{{ extra | length if extra is sequence }}{{ 'a' * extra "
        "if extra is integer }}"
    )
    try:
        assert isinstance(
            ChatTemplate(source, {}).render(Chat(messages=USER, template_kwargs={"extra": value})),
            str,
        )
    except RequestError as error:
        assert error.parameter
