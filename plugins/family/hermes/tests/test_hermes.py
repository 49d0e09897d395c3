"""The tool parser hermes, apart from its contract."""

from __future__ import annotations

from pegboard_family_hermes.tool_parser import HermesToolParser

from pegboard_chat.parsing import fold
from pegboard_testing.contract_output_parser import run


def test_arguments_stream_while_they_come() -> None:
    parser = HermesToolParser()
    parser.feed('<tool_call>{"name": "f", "arguments": {"x": "a', ())
    assert [getattr(event, "text", None) for event in parser.feed("bc", ())] == ["bc"]
    assert run(parser, ['"}}</tool_call>'])[-1].index == 0  # type: ignore[union-attr]


def test_a_quotation_mark_in_a_call_quotes_no_tag_after_it() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "a"</tool_call> b'
    message = fold(run(HermesToolParser(), text))
    assert message.content.strip() == "b"
    assert [call.arguments for call in message.tool_calls] == ['{"x": "a"}']
