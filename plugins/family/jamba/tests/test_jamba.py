"""The tool parser jamba passes the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_jamba.tool_parser import JambaToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples


class TestJamba(OutputParserContract):
    examples = load_examples(Path(__file__).with_name("examples.py"))["tool_parser", "jamba"]

    def parser(self, setup: OutputParserSetup) -> JambaToolParser:
        return JambaToolParser(None, setup)
