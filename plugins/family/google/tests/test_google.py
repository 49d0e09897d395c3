"""The parser of FunctionGemma, apart from its contract."""

from __future__ import annotations

from pegboard_family_google.tool_parser import FunctionGemmaToolParser

from pegboard_chat.parsing import fold
from pegboard_testing.contract_output_parser import run


def test_strings_stream_while_they_come() -> None:
    parser = FunctionGemmaToolParser()
    parser.feed("<start_function_call>call:f{x:<escape>ab", ())
    assert [getattr(event, "text", None) for event in parser.feed('c"<esc', ())] == ['c\\"']


def test_a_call_that_breaks_off_in_a_key_leaves_the_next_one() -> None:
    start = "<start_function_call>call:"
    text = f"{start}f{{<escape>ke\n{start}g{{x:1}}<end_function_call>"
    calls = fold(run(FunctionGemmaToolParser(), text)).tool_calls
    assert [(call.name, call.arguments) for call in calls] == [("f", "{}"), ("g", '{"x": "1"}')]


def test_an_escaped_key_may_hold_the_sign_that_begins_markers() -> None:
    text = "<start_function_call>call:f{<escape>a<b<escape>:1}<end_function_call>"
    for pieces in ([text], list(text)):
        (call,) = fold(run(FunctionGemmaToolParser(), pieces)).tool_calls
        assert call.arguments == '{"a<b": "1"}'
