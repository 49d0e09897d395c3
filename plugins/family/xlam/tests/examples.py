"""Outputs in the formats of xLAM and what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable

from pegboard_testing.parser_examples import ADD, NOW, PARIS, Case, Example, rendered


def calls_of(case: Case) -> str:
    calls = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in case.calls
    ]
    return f"[{', '.join(calls)}]"


def writer(start: str, end: str) -> Callable[[Case], str]:
    return lambda case: (
        case.before + (f"{start}{calls_of(case)}{end}" if case.calls else "") + case.after
    )


def behind(case: Case) -> str:
    return "with text after the list the peer finds no call" if case.calls and case.after else ""


BARE = writer("", "")
FENCED = writer("```json\n", "\n```")
TAGGED = writer("<tool_call>", "</tool_call>")

EXAMPLES = {
    ("tool_parser", "xlam"): [
        *rendered(BARE, has_before=False, has_between=False, differs=behind),
        *rendered(FENCED, has_between=False),
        *rendered(TAGGED, has_between=False)[:12],
        *rendered(writer("[TOOL_CALLS]", ""), has_between=False, has_after=False)[:12],
        Example(
            "a fence without a language",
            f"```\n{calls_of(Case('', (NOW, ADD)))}\n```",
            calls=(NOW, ADD),
        ),
        Example(
            "after reasoning",
            f"<think>Hm.</think>{calls_of(Case('', (PARIS,)))}",
            content="<think>Hm.</think>",
            calls=(PARIS,),
        ),
        Example(
            "lines",
            '[\n  {\n    "name": "add",\n    "arguments": {"a": 2, "b": 40}\n  }\n]\n',
            calls=(ADD,),
        ),
        Example(
            "arguments first",
            '[{"arguments": {"city": "Paris"}, "name": "get_weather"}]',
            calls=(PARIS,),
        ),
        Example(
            "parameters",
            '[{"name": "now", "parameters": {}}]',
            calls=(NOW,),
            differs="the peer knows only `arguments`",
        ),
        Example(
            "cut off",
            '[{"name": "get_weather", "arguments": {"city": "Par',
            open_call=("get_weather", '{"city": "Par'),
            differs="the peer finds no call, its stream returns other text",
        ),
        Example(
            "two lists",
            f"{FENCED(Case('', (NOW,)))}\n{FENCED(Case('', (ADD,)))}",
            calls=(NOW, ADD),
            differs="the peer reads one list",
        ),
        Example("an empty list", "[]", content="[]"),
        Example("another list", "[1, 2, 3]", content="[1, 2, 3]"),
        Example("code", "```python\nx = [1]\n```", content="```python\nx = [1]\n```"),
        Example(
            "other JSON in a fence", '```json\n{"a": 1}\n```', content='```json\n{"a": 1}\n```'
        ),
    ]
}
