"""The parsers of DeepSeek pass the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_deepseek.reasoning_parser import DeepSeekR1ReasoningParser, DeepSeekV3ReasoningParser
from pegboard_family_deepseek.tags_parser import DeepSeekV32ToolParser
from pegboard_family_deepseek.tool_parser import DeepSeekV3ToolParser, DeepSeekV31ToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestV3(OutputParserContract):
    examples = EXAMPLES["tool_parser", "deepseek_v3"]

    def parser(self, setup: OutputParserSetup) -> DeepSeekV3ToolParser:
        return DeepSeekV3ToolParser(None, setup)


class TestV31(OutputParserContract):
    examples = EXAMPLES["tool_parser", "deepseek_v31"]

    def parser(self, setup: OutputParserSetup) -> DeepSeekV31ToolParser:
        return DeepSeekV31ToolParser(None, setup)


class TestV32(OutputParserContract):
    examples = EXAMPLES["tool_parser", "deepseek_v32"]

    def parser(self, setup: OutputParserSetup) -> DeepSeekV32ToolParser:
        return DeepSeekV32ToolParser(None, setup)


class TestR1Reasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "deepseek_r1"]
    plain_is_reasoning = True

    def parser(self, setup: OutputParserSetup) -> DeepSeekR1ReasoningParser:
        return DeepSeekR1ReasoningParser(None, setup)


class TestV3Reasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "deepseek_v3"]

    def parser(self, setup: OutputParserSetup) -> DeepSeekV3ReasoningParser:
        return DeepSeekV3ReasoningParser(None, setup)
