"""The parsers of Olmo pass the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_olmo.reasoning_parser import Olmo3ReasoningParser
from pegboard_family_olmo.tool_parser import Olmo3ToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestOlmo3(OutputParserContract):
    examples = EXAMPLES["tool_parser", "olmo3"]

    def parser(self, setup: OutputParserSetup) -> Olmo3ToolParser:
        return Olmo3ToolParser(None, setup)


class TestOlmo3Reasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "olmo3"]
    plain_is_reasoning = True

    def parser(self, setup: OutputParserSetup) -> Olmo3ReasoningParser:
        return Olmo3ReasoningParser(None, setup)
