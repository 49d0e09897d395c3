"""The parsers of Kimi K2, apart from their contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_kimi.tool_parser import KimiK2ToolParser

from pegboard.interfaces.output_parser import ToolCallStart
from pegboard_testing.contract_output_parser import run
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


def test_ids_are_the_models_own() -> None:
    text = next(
        example.text
        for example in EXAMPLES["tool_parser", "kimi_k2"]
        if example.name == "two calls"
    )
    starts = [
        event for event in run(KimiK2ToolParser(), [text]) if isinstance(event, ToolCallStart)
    ]
    assert [start.id for start in starts] == ["functions.get_weather:0", "functions.get_weather:1"]
