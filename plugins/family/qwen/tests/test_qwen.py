"""The parsers of Qwen, apart from their contract, and its families."""

from __future__ import annotations

import pytest
from pegboard_family_qwen import plugin
from pegboard_family_qwen.tool_parser import Qwen3CoderToolParser


def test_strings_stream_while_they_come() -> None:
    parser = Qwen3CoderToolParser()
    parser.feed("<function=f><parameter=x>\nab", ())
    # the newline may belong to the end
    assert [getattr(event, "text", None) for event in parser.feed('c"\n', ())] == ['c\\"']


@pytest.mark.parametrize(
    ("markers", "recommended"),
    [
        (plugin.QWEN2_5.template_markers, {"tool_parser": "hermes"}),
        (plugin.QWEN3_CODER.template_markers, {"tool_parser": "qwen3_coder"}),
        (
            plugin.QWEN3_5.template_markers,
            {"tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"},
        ),
    ],
)
def test_families_are_told_apart_by_the_template(
    markers: tuple[str, ...], recommended: dict[str, str]
) -> None:
    """When several families match, the one with the most markers is chosen."""
    families = [
        plugin.QWEN2_5,
        plugin.QWQ,
        plugin.QWEN3_INSTRUCT,
        plugin.QWEN3_THINKING,
        plugin.QWEN3_CODER,
        plugin.QWEN3_5,
    ]
    fitting = [family for family in families if set(family.template_markers) <= set(markers)]
    assert max(fitting, key=lambda family: len(family.template_markers)).recommends == recommended
