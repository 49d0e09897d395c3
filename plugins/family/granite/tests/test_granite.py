"""The parsers of Granite pass the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_granite.reasoning_parser import GraniteReasoningParser
from pegboard_family_granite.tool_parser import Granite20bFCToolParser, GraniteToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import VOCABULARY, OutputParserContract
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestGranite(OutputParserContract):
    examples = EXAMPLES["tool_parser", "granite"]

    def parser(self, setup: OutputParserSetup) -> GraniteToolParser:
        return GraniteToolParser(None, setup)


class TestGranite20bFC(OutputParserContract):
    examples = EXAMPLES["tool_parser", "granite-20b-fc"]

    def parser(self, setup: OutputParserSetup) -> Granite20bFCToolParser:
        return Granite20bFCToolParser(None, setup)


class TestGraniteReasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "granite"]

    def parser(self, setup: OutputParserSetup) -> GraniteReasoningParser:
        return GraniteReasoningParser(None, setup)


def test_a_grammar_waits_for_the_response_only_when_the_model_thinks() -> None:
    assert GraniteReasoningParser(None, OutputParserSetup(VOCABULARY)).reasoning_end() == ()
    thinking = OutputParserSetup(VOCABULARY, template_kwargs={"thinking": True})
    assert "Here is my response:" in GraniteReasoningParser(None, thinking).reasoning_end()
