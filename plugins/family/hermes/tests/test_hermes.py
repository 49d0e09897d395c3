"""The tool parser hermes passes the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_hermes.tool_parser import HermesToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract, run
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestHermes(OutputParserContract):
    examples = EXAMPLES["tool_parser", "hermes"]

    def parser(self, setup: OutputParserSetup) -> HermesToolParser:
        return HermesToolParser(None, setup)


def test_arguments_stream_while_they_come() -> None:
    parser = HermesToolParser()
    parser.feed('<tool_call>{"name": "f", "arguments": {"x": "a', ())
    assert [getattr(event, "text", None) for event in parser.feed("bc", ())] == ["bc"]
    assert run(parser, ['"}}</tool_call>'])[-1].index == 0  # type: ignore[union-attr]
