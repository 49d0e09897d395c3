"""The parsers of Qwen pass the contract."""

from __future__ import annotations

from pathlib import Path

import pytest
from pegboard_family_qwen import plugin
from pegboard_family_qwen.reasoning_parser import Qwen3ReasoningParser
from pegboard_family_qwen.tool_parser import Qwen3CoderToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestQwen3Coder(OutputParserContract):
    examples = EXAMPLES["tool_parser", "qwen3_coder"]

    def parser(self, setup: OutputParserSetup) -> Qwen3CoderToolParser:
        return Qwen3CoderToolParser(None, setup)


class TestQwen3Reasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "qwen3"]
    plain_is_reasoning = True

    def parser(self, setup: OutputParserSetup) -> Qwen3ReasoningParser:
        return Qwen3ReasoningParser(None, setup)


def test_strings_stream_while_they_come() -> None:
    parser = Qwen3CoderToolParser()
    parser.feed("<function=f><parameter=x>\nab", ())
    assert [getattr(event, "text", None) for event in parser.feed('c"\n', ())] == ['c\\"']  # the newline may belong to the end


@pytest.mark.parametrize(
    ("markers", "recommended"),
    [
        (plugin.QWEN2_5.template_markers, {"tool_parser": "hermes"}),
        (plugin.QWEN3_CODER.template_markers, {"tool_parser": "qwen3_coder"}),
        (plugin.QWEN3_5.template_markers, {"tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"}),
    ],
)
def test_families_are_told_apart_by_the_template(markers: tuple[str, ...], recommended: dict[str, str]) -> None:
    """Among the families that match, the one with the most markers is chosen."""
    families = [plugin.QWEN2_5, plugin.QWQ, plugin.QWEN3_INSTRUCT, plugin.QWEN3_THINKING, plugin.QWEN3_CODER, plugin.QWEN3_5]
    fitting = [family for family in families if set(family.template_markers) <= set(markers)]
    assert max(fitting, key=lambda family: len(family.template_markers)).recommends == recommended
