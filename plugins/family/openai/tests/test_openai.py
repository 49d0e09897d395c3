"""The parsers of gpt-oss keep the contract, alone and one behind the other."""

from __future__ import annotations

import json
from pathlib import Path

from pegboard_family_openai.harmony import HarmonyReasoningParser, HarmonyToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard.parsing import Pipeline, fold, merged
from pegboard.testing.contract_output_parser import OutputParserContract
from pegboard.testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestHarmonyTools(OutputParserContract):
    examples = EXAMPLES["tool_parser", "openai"]

    def parser(self, setup: OutputParserSetup) -> HarmonyToolParser:
        return HarmonyToolParser(None, setup)


class TestHarmonyReasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "openai_gptoss"]

    def parser(self, setup: OutputParserSetup) -> HarmonyReasoningParser:
        return HarmonyReasoningParser(None, setup)


def test_one_behind_the_other_reads_the_same() -> None:
    for example in EXAMPLES["tool_parser", "openai"]:
        pipeline = Pipeline(HarmonyReasoningParser(), HarmonyToolParser())
        events = [event for character in example.text for event in pipeline.feed(character, ())]
        message = fold(merged(events + pipeline.finish()))
        calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls if call.is_complete]
        assert calls == list(example.calls), example
        assert message.reasoning == example.reasoning, example
        assert message.content.split() == example.content.split(), example
