"""The parsers of Step3 pass the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_step.reasoning_parser import Step3ReasoningParser
from pegboard_family_step.tool_parser import Step3ToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestStep3(OutputParserContract):
    examples = EXAMPLES["tool_parser", "step3"]

    def parser(self, setup: OutputParserSetup) -> Step3ToolParser:
        return Step3ToolParser(None, setup)


class TestStep3Reasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "step3"]
    plain_is_reasoning = True

    def parser(self, setup: OutputParserSetup) -> Step3ReasoningParser:
        return Step3ReasoningParser(None, setup)
