"""The parser of Holo2 passes the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_holo.reasoning_parser import Holo2ReasoningParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestHolo2Reasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "holo2"]
    plain_is_reasoning = True

    def parser(self, setup: OutputParserSetup) -> Holo2ReasoningParser:
        return Holo2ReasoningParser(None, setup)
