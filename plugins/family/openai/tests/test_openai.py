"""The parsers of gpt-oss, used one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pegboard_family_openai.harmony import HarmonyReasoningParser, HarmonyToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_chat.parsing import Message, Pipeline, fold, merged
from pegboard_testing.contract_output_parser import VOCABULARY, setup_for
from pegboard_testing.parser_examples import load_examples, tool

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
PYTHON = (tool("python", code="string"),)


def test_one_behind_the_other_reads_the_same() -> None:
    for example in EXAMPLES["tool_parser", "openai"]:
        setup = setup_for(example)
        pipeline = Pipeline(HarmonyReasoningParser(None, setup), HarmonyToolParser(None, setup))
        events = [event for character in example.text for event in pipeline.feed(character, ())]
        message = fold(merged(events + pipeline.finish()))
        calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls if call.is_complete]
        assert calls == list(example.calls), example
        assert message.reasoning == example.reasoning, example
        assert message.content.split() == example.content.split(), example


def parsed(text: str, *, reasons: bool = True) -> Message:
    """Read the text in one piece and character by character. Returns the common result."""
    found = []
    for pieces in ([text], list(text)):
        setup = OutputParserSetup(VOCABULARY, PYTHON)
        pipeline = Pipeline(HarmonyReasoningParser(None, setup) if reasons else None, HarmonyToolParser(None, setup))
        events = [event for piece in pieces for event in pipeline.feed(piece, ())]
        found.append(fold(merged(events + pipeline.finish())))
    assert shape(found[0]) == shape(found[1])
    return found[0]


def shape(message: Message) -> tuple[Any, ...]:
    calls = [(call.name, json.loads(call.arguments), call.is_complete) for call in message.tool_calls]
    return message.content, message.reasoning, calls


@given(
    st.text(max_size=30).filter(lambda text: "<" not in text and not text.strip().startswith("{") and text.strip()),
    st.sampled_from(["analysis to=python code", "commentary to=functions.python", "analysis to=python"]),
    st.sampled_from(["", "<|call|>"]),
)
def test_any_code_is_the_argument(code: str, header: str, end: str) -> None:
    """The end token may be missing: it stops the generation and is therefore rarely in the text. Such a call looks the same as
    one that is cut off, so these are not examples of the contract. Code that runs calls must check the finish reason."""
    text = f"{CHANNEL}analysis{MESSAGE}Hm.<|end|>{START}assistant{CHANNEL}{header}{MESSAGE}{code}{end}"
    assert shape(parsed(text)) == ("", "Hm.", [("python", {"code": code}, True)])


def test_code_ends_where_the_next_message_begins() -> None:
    """This works only when the tool parser is used alone. The reasoning parser removes headers, and after it only an end token
    ends a call."""
    text = f"{CHANNEL}commentary to=python code{MESSAGE}print(1){START}assistant{CHANNEL}final{MESSAGE}So."
    assert shape(parsed(text, reasons=False)) == ("So.", "", [("python", {"code": "print(1)"}, True)])
