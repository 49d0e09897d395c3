"""The parsers of gpt-oss, used one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_family_openai.harmony import HarmonyReasoningParser, HarmonyToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_chat.parsing import Message, Pipeline, fold, merged
from pegboard_testing.contract_output_parser import VOCABULARY, run, setup_for
from pegboard_testing.parser_examples import load_examples, load_tokens, tool
from pegboard_testing.parser_mutations import mutated

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))
START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
TOKENS = load_tokens(Path(__file__).with_name("examples.py"))
PYTHON = (tool("python", code="string"),)


def test_one_behind_the_other_reads_the_same() -> None:
    for example in EXAMPLES["tool_parser", "openai"]:
        setup = setup_for(example)
        pipeline = Pipeline(HarmonyReasoningParser(None, setup), HarmonyToolParser(None, setup))
        events = [event for character in example.text for event in pipeline.feed(character, ())]
        message = fold(merged(events + pipeline.finish()))
        calls = [
            (call.name, json.loads(call.arguments))
            for call in message.tool_calls
            if call.is_complete
        ]
        assert calls == list(example.calls), example
        assert message.reasoning == example.reasoning, example
        assert message.content.split() == example.content.split(), example


@pytest.mark.parametrize("recipient", ["functions.get_weather", "functions.other", "browser"])
def test_text_for_any_function_is_a_call(recipient: str) -> None:
    for reasons in (True, False):
        message = parsed(
            f"{CHANNEL}commentary to={recipient} <|constrain|>json{MESSAGE}foo <|call|>",
            reasons=reasons,
        )
        assert shape(message) == (
            "",
            "",
            [(recipient.removeprefix("functions."), {"input": "foo "}, True)],
        )


def test_text_is_the_only_required_parameter() -> None:
    tools = (tool("run", code="string", seconds="integer"),)
    tools[0]["function"]["parameters"]["required"] = ["code"]
    parser = HarmonyToolParser(None, OutputParserSetup(VOCABULARY, tools))
    (call,) = fold(
        run(parser, [f"{CHANNEL}commentary to=functions.run{MESSAGE}1 + 1<|call|>"])
    ).tool_calls
    assert json.loads(call.arguments) == {"code": "1 + 1"}


def test_without_tools_the_reasoning_parser_leaves_calls_too() -> None:
    setup = OutputParserSetup(VOCABULARY)
    text = f"{CHANNEL}commentary to=functions.f{MESSAGE}{{}}<|call|>"
    assert fold(run(HarmonyReasoningParser(None, setup), [text])).content == text
    pipeline = Pipeline(HarmonyReasoningParser(None, setup), HarmonyToolParser(None, setup))
    assert shape(fold([*pipeline.feed(text, ()), *pipeline.finish()])) == (
        "",
        "",
        [("f", {}, True)],
    )


@pytest.mark.parametrize(
    "header",
    [
        f"{CHANNEL}commentary{CHANNEL}commentary to=functions.add <|constrain|>json",
        f"{CHANNEL}commentary to=functions.add{CHANNEL}commentary to=functions.add",
        f"{START}assistant{START}assistant{CHANNEL}commentary to=functions.add",
        f"{CHANNEL}analysis{CHANNEL}commentary to=functions.add code",
    ],
)
def test_a_doubled_header_keeps_its_call(header: str) -> None:
    (call,) = parsed(f'{header}{MESSAGE}{{"a": 1}}<|call|>').tool_calls
    assert (call.name, json.loads(call.arguments), call.is_complete) == ("add", {"a": 1}, True)


def test_a_broken_header_keeps_its_words() -> None:
    assert shape(parsed(f"{CHANNEL}assistantfinal{MESSAGE}Hello.")) == (
        "assistantfinal\nHello.",
        "",
        [],
    )
    assert shape(parsed(f"{START}assistant{MESSAGE}Hello.")) == ("Hello.", "", [])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_control_token_reaches_the_content(data: st.DataObject) -> None:
    """Whatever mistake the model makes, and with or without the reasoning parser."""
    examples = EXAMPLES["tool_parser", "openai"]
    text = mutated(
        data.draw(st.sampled_from(examples)).text,
        TOKENS,
        data.draw(st.randoms(use_true_random=False)),
    )
    for reasons in (True, False):
        message = parsed(text, reasons=reasons, check=False)
        assert not any(token in message.content + message.reasoning for token in TOKENS), (
            text,
            message,
        )


def parsed(text: str, *, reasons: bool = True, check: bool = True) -> Message:
    """Read the text in one piece and character by character. Returns the common result."""
    found = []
    for pieces in ([text], list(text)):
        setup = OutputParserSetup(VOCABULARY, PYTHON)
        pipeline = Pipeline(
            HarmonyReasoningParser(None, setup) if reasons else None, HarmonyToolParser(None, setup)
        )
        events = [event for piece in pieces for event in pipeline.feed(piece, ())]
        found.append(fold(merged(events + pipeline.finish())))
    assert not check or shape(found[0]) == shape(found[1])
    return found[0]


def shape(message: Message) -> tuple[Any, ...]:
    calls = [
        (call.name, json.loads(call.arguments), call.is_complete) for call in message.tool_calls
    ]
    return message.content, message.reasoning, calls


@given(
    st.text(max_size=30).filter(
        lambda text: "<" not in text and not text.strip().startswith("{") and text.strip()
    ),
    st.sampled_from(
        ["analysis to=python code", "commentary to=functions.python", "analysis to=python"]
    ),
    st.sampled_from(["", "<|call|>"]),
)
def test_any_code_is_the_argument(code: str, header: str, end: str) -> None:
    """The end token may be missing: it stops the generation and is therefore rarely in the text.
    Such a call looks the same as one that is cut off, so these are not examples of the contract.
    Code that runs calls must check the finish reason."""
    text = (
        f"{CHANNEL}analysis{MESSAGE}Hm.<|end|>{START}assistant{CHANNEL}{header}{MESSAGE}{code}{end}"
    )
    assert shape(parsed(text)) == ("", "Hm.", [("python", {"code": code}, True)])


def test_code_ends_where_the_next_message_begins() -> None:
    """This works only when the tool parser is used alone. The reasoning parser removes headers, and
    after it only an end token ends a call."""
    text = (
        f"{CHANNEL}commentary to=python "
        f"code{MESSAGE}print(1){START}assistant{CHANNEL}final{MESSAGE}So."
    )
    assert shape(parsed(text, reasons=False)) == (
        "So.",
        "",
        [("python", {"code": "print(1)"}, True)],
    )


@pytest.mark.parametrize("count", range(len("<|call|>")))
def test_a_token_that_is_cut_off_is_not_an_argument(count: int) -> None:
    message = parsed(f"{CHANNEL}commentary to=functions.f{MESSAGE}{'<|call|>'[:count]}")
    assert shape(message) == ("", "", [("f", {}, False)])
