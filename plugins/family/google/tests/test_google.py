"""The parser of FunctionGemma, apart from its contract."""

from __future__ import annotations

from pegboard_family_google.tool_parser import FunctionGemmaToolParser


def test_strings_stream_while_they_come() -> None:
    parser = FunctionGemmaToolParser()
    parser.feed("<start_function_call>call:f{x:<escape>ab", ())
    assert [getattr(event, "text", None) for event in parser.feed('c"<esc', ())] == ['c\\"']
