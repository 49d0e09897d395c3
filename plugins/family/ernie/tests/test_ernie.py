"""The parsers of ERNIE pass the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_ernie.reasoning_parser import Ernie45ReasoningParser
from pegboard_family_ernie.tool_parser import Ernie45ToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestErnie45(OutputParserContract):
    examples = EXAMPLES["tool_parser", "ernie45"]

    def parser(self, setup: OutputParserSetup) -> Ernie45ToolParser:
        return Ernie45ToolParser(None, setup)


class TestErnie45Reasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "ernie45"]
    plain_is_reasoning = True

    def parser(self, setup: OutputParserSetup) -> Ernie45ReasoningParser:
        return Ernie45ReasoningParser(None, setup)
