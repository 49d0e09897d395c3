"""The tool parser xlam passes the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_xlam.tool_parser import XlamToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples


class TestXlam(OutputParserContract):
    examples = load_examples(Path(__file__).with_name("examples.py"))["tool_parser", "xlam"]

    def parser(self, setup: OutputParserSetup) -> XlamToolParser:
        return XlamToolParser(None, setup)
