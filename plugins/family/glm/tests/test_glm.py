"""The parsers of GLM pass the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_glm.reasoning_parser import GlmReasoningParser
from pegboard_family_glm.tool_parser import GlmToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestGlm45(OutputParserContract):
    examples = EXAMPLES["tool_parser", "glm45"]

    def parser(self, setup: OutputParserSetup) -> GlmToolParser:
        return GlmToolParser(None, setup)


class TestGlm47(TestGlm45):
    examples = EXAMPLES["tool_parser", "glm47"]


class TestGlmReasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "glm45"]
    plain_is_reasoning = True

    def parser(self, setup: OutputParserSetup) -> GlmReasoningParser:
        return GlmReasoningParser(None, setup)
