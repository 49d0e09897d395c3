"""The parsers of Mistral keep the contract."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from pegboard_family_mistral.reasoning_parser import MistralReasoningParser
from pegboard_family_mistral.tool_parser import MistralToolParser

from pegboard.interfaces.output_parser import Event, OutputParserSetup, ToolCallStart
from pegboard.parsing import fold
from pegboard.testing.contract_output_parser import OutputParserContract, run
from pegboard.testing.parser_examples import Example, load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestMistral(OutputParserContract):
    examples = EXAMPLES["tool_parser", "mistral"]

    def parser(self, setup: OutputParserSetup) -> MistralToolParser:
        return MistralToolParser(None, setup)

    def parse(self, example: Example, pieces: Iterable[str]) -> list[Event]:
        """Without the ids that are not the model's own."""
        return [
            dataclasses.replace(event, id="")
            if isinstance(event, ToolCallStart) and f"[CALL_ID]{event.id}" not in example.text
            else event
            for event in super().parse(example, pieces)
        ]


class TestMistralReasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "mistral"]

    def parser(self, setup: OutputParserSetup) -> MistralReasoningParser:
        return MistralReasoningParser(None, setup)


def test_ids_are_those_that_the_templates_take() -> None:
    text = '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS][{"name": "g", "arguments": {}}]'
    ids = [call.id for call in fold(run(MistralToolParser(), [text])).tool_calls]
    assert len(set(ids)) == 3 and all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in ids)
    assert ids[1] == "a1B2c3D4e"
