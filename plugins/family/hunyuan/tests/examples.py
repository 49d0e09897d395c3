"""Outputs in the format of Hunyuan and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import (
    ADD,
    NOW,
    PARIS,
    Case,
    Example,
    drops_text,
    rendered,
    with_reasoning,
)


def write(case: Case) -> str:
    """Text between calls is written between two lists."""
    calls = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in case.calls
    ]
    lists = calls if case.between else [", ".join(calls)] if calls else []
    return (
        case.before
        + case.between.join(f"<tool_calls>[{calls}]</tool_calls>" for calls in lists)
        + case.after
    )


THOUGHTS = ("Let me think.\nYes, 1 < 2.", '北京 {"a": 1}')
CALL = write(Case("", (PARIS,)))
CLOSED = "<think>\n\n</think>\n"

EXAMPLES = {
    ("tool_parser", "hunyuan_a13b"): [
        *rendered(write, differs=drops_text()),
        Example(
            "lines",
            '<tool_calls>\n[\n  {"name": "now", "arguments": {}},\n  {"name": "add", "arguments": '
            '{"a": 2, "b": 40}}\n]\n'
            "</tool_calls>",
            calls=(NOW, ADD),
        ),
        Example(
            "one object",
            '<tool_calls>{"name": "now", "arguments": {}}</tool_calls>',
            calls=(NOW,),
            differs="the peer reads only lists",
        ),
        Example(
            "no arguments key",
            '<tool_calls>[{"name": "now"}]</tool_calls>',
            calls=(NOW,),
            differs="the peer reads no call without arguments",
        ),
        Example(
            "no end tag",
            '<tool_calls>[{"name": "now", "arguments": {}}]',
            calls=(NOW,),
            differs="the peer needs the end tag",
        ),
        Example(
            "cut off",
            '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Par',
            open_call=("get_weather", '{"city": "Par'),
            differs="the peer needs the end tag",
        ),
        Example(
            "no call",
            "The tag <tool_calls> begins calls.",
            content="The tag <tool_calls> begins calls.",
        ),
    ],
    ("reasoning_parser", "hunyuan_a13b"): [
        *with_reasoning(
            rendered(write)[:30],
            lambda thought, text: f"<think>\n{thought}\n</think>\n<answer>\n{text}\n</answer>",
            THOUGHTS,
        ),
        *with_reasoning(
            rendered(write)[30:34],
            lambda thought, text: f"<think>\n{thought}\n</think>\n<answer>\n{text}\n</answer>",
        ),
        Example(
            "dense",
            "<think>Hm.</think><answer>Hello.</answer>",
            content="Hello.",
            reasoning="Hm.",
            differs="the peer needs the newlines",
        ),
        Example("empty", "<think>\n\n</think>\n<answer>\nHello.\n</answer>", content="Hello."),
        Example(
            "off, closed in the prompt",
            "<answer>\nHello.\n</answer>",
            content="Hello.",
            prompt_end=CLOSED,
            differs="the peer reads the tags only after reasoning",
        ),
        Example("no tags", "Hello.", content="Hello."),
        Example(
            "no end",
            "<think>\nHm.",
            reasoning="Hm.",
            differs="the peer reads reasoning without an end as content",
        ),
        Example(
            "no end of the answer",
            "<think>\nHm.\n</think>\n<answer>\nHello.",
            content="Hello.",
            reasoning="Hm.",
        ),
        Example(
            "only the end",
            "<think>\nHm.\n</think>",
            reasoning="Hm.",
            differs="the peer needs an answer after it",
        ),
        Example(
            "a call in the answer",
            f"<think>\nHm.\n</think>\n<answer>\n{CALL}\n</answer>",
            content=CALL,
            reasoning="Hm.",
        ),
        Example(
            "a call without answer",
            f"<think>\nHm.\n</think>\n{CALL}",
            content=CALL,
            reasoning="Hm.",
            differs="the peer needs the answer's tags",
        ),
    ],
}
