"""The parser of FunctionGemma passes the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_google.tool_parser import FunctionGemmaToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestFunctionGemma(OutputParserContract):
    examples = EXAMPLES["tool_parser", "functiongemma"]

    def parser(self, setup: OutputParserSetup) -> FunctionGemmaToolParser:
        return FunctionGemmaToolParser(None, setup)


def test_strings_stream_while_they_come() -> None:
    parser = FunctionGemmaToolParser()
    parser.feed("<start_function_call>call:f{x:<escape>ab", ())
    assert [getattr(event, "text", None) for event in parser.feed('c"<esc', ())] == ['c\\"']
