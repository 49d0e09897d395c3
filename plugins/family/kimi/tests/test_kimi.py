"""The parsers of Kimi K2 pass the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_kimi.reasoning_parser import KimiK2ReasoningParser
from pegboard_family_kimi.tool_parser import KimiK2ToolParser

from pegboard.interfaces.output_parser import OutputParserSetup, ToolCallStart
from pegboard_testing.contract_output_parser import OutputParserContract, run
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestKimiK2(OutputParserContract):
    examples = EXAMPLES["tool_parser", "kimi_k2"]

    def parser(self, setup: OutputParserSetup) -> KimiK2ToolParser:
        return KimiK2ToolParser(None, setup)


class TestKimiK2Reasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "kimi_k2"]
    plain_is_reasoning = True

    def parser(self, setup: OutputParserSetup) -> KimiK2ReasoningParser:
        return KimiK2ReasoningParser(None, setup)


def test_ids_are_the_models_own() -> None:
    text = next(example.text for example in EXAMPLES["tool_parser", "kimi_k2"] if example.name == "two calls")
    starts = [event for event in run(KimiK2ToolParser(), [text]) if isinstance(event, ToolCallStart)]
    assert [start.id for start in starts] == ["functions.get_weather:0", "functions.get_weather:1"]
