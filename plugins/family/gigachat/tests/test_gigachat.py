"""The tool parser gigachat3 passes the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_gigachat.tool_parser import GigaChat3ToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples


class TestGigaChat3(OutputParserContract):
    examples = load_examples(Path(__file__).with_name("examples.py"))["tool_parser", "gigachat3"]

    def parser(self, setup: OutputParserSetup) -> GigaChat3ToolParser:
        return GigaChat3ToolParser(None, setup)
