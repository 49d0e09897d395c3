"""The tool parser longcat passes the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_longcat.tool_parser import LongCatToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples


class TestLongCat(OutputParserContract):
    examples = load_examples(Path(__file__).with_name("examples.py"))["tool_parser", "longcat"]

    def parser(self, setup: OutputParserSetup) -> LongCatToolParser:
        return LongCatToolParser(None, setup)
