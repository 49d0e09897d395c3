"""Outputs in the formats of Granite and what they mean."""

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

TOKENS = ("<|tool_call|>",)


def dumped(case: Case) -> list[str]:
    return [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in case.calls
    ]


def write(case: Case) -> str:
    return (
        case.before
        + (f"<|tool_call|>[{', '.join(dumped(case))}]" if case.calls else "")
        + case.after
    )


def write_word(case: Case) -> str:
    return (
        case.before + (f"<tool_call>[{', '.join(dumped(case))}]" if case.calls else "") + case.after
    )


def write_20b(case: Case) -> str:
    calls = [f"<function_call> {call}" for call in dumped(case)]
    return case.before + (case.between or "\n").join(calls) + case.after


def think(thought: str, text: str) -> str:
    return f"Here is my thought process: {thought}\n\nHere is my response: {text}"


def think_short(thought: str, text: str) -> str:
    return f"Here's my thought process: {thought} Here's my response: {text}"


EXAMPLES = {
    ("tool_parser", "granite"): [
        *rendered(write, has_between=False),
        *rendered(write_word, has_between=False)[:8],
        Example(
            "lines",
            (
                '<|tool_call|>\n[\n  {"name": "now", "arguments": {}},\n  {"name": "add", '
                '"arguments": {"a": 2, "b": 40}}\n]'
            ),
            calls=(NOW, ADD),
        ),
        Example(
            "arguments first",
            '<|tool_call|>[{"arguments": {"city": "Paris"}, "name": "get_weather"}]',
            calls=(PARIS,),
        ),
        Example(
            "two lists", write(Case("", (PARIS,))) + write(Case("", (ADD,))), calls=(PARIS, ADD)
        ),
        Example(
            "cut off",
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Par',
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example(
            "no call",
            "Say <tool_call> now.",
            content="Say <tool_call> now.",
            differs="the peer drops the marker",
        ),
        Example(
            "no name",
            '<|tool_call|>[{"arguments": {}}]',
            content='<|tool_call|>[{"arguments": {}}]',
            differs="the peer drops it",
        ),
    ],
    ("tool_parser", "granite-20b-fc"): [
        *rendered(write_20b, differs=drops_text()),
        Example(
            "on a new line",
            '<function_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}',
            calls=(ADD,),
        ),
        Example(
            "close together",
            write_20b(Case("", (PARIS, ADD), between="")).replace("\n", ""),
            calls=(PARIS, ADD),
        ),
        Example(
            "cut off",
            '<function_call> {"name": "get_weather", "arguments": {"city": "Par',
            open_call=("get_weather", '{"city": "Par'),
            differs="the peer closes the JSON in a stream, but reads the whole text as content",
        ),
        Example("no call", "Say <function_call> to call.", content="Say <function_call> to call."),
    ],
    ("reasoning_parser", "granite"): [
        *with_reasoning(rendered(write)[:30], think),
        *with_reasoning(rendered(write)[20:50], think_short),
        Example("none", "Hello.", content="Hello."),
        Example("similar words", "Here is my thought: no.", content="Here is my thought: no."),
        Example(
            "words in the answer",
            think("Hm.", "Here is my response: x"),
            content="Here is my response: x",
            reasoning="Hm.",
        ),
        Example("no response", "Here is my thought process: Hm.", reasoning="Hm."),
    ],
}
