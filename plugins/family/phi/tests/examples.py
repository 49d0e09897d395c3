"""Outputs in the formats of Phi-4-mini and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import ADD, NOW, PARIS, Case, Example, rendered

TOKENS = ("<|tool_call|>", "<|/tool_call|>")


def calls_of(case: Case) -> str:
    calls = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in case.calls
    ]
    return f"[{', '.join(calls)}]"


def write(case: Case) -> str:
    return case.before + (f"functools{calls_of(case)}" if case.calls else "") + case.after


def write_tokens(case: Case) -> str:
    return (
        case.before
        + (f"<|tool_call|>{calls_of(case)}<|/tool_call|>" if case.calls else "")
        + case.after
    )


def differs(case: Case) -> str:
    if "]" in calls_of(case)[:-1]:
        return "the peer ends the list at the first ]"
    return "the peer drops text around the list" if case.calls and case.content else ""


def differs_tokens(case: Case) -> str:
    return "the peer does not know these tokens" if case.calls else ""


EXAMPLES = {
    ("tool_parser", "phi4_mini_json"): [
        *rendered(write, has_between=False, differs=differs),
        *rendered(write_tokens, has_between=False, differs=differs_tokens)[:12],
        Example(
            "lines",
            'functools[\n  {\n    "name": "add",\n    "arguments": {"a": 2, "b": 40}\n  }\n]',
            calls=(ADD,),
        ),
        Example(
            "arguments first",
            'functools[{"arguments": {"city": "Paris"}, "name": "get_weather"}]',
            calls=(PARIS,),
        ),
        Example("parameters", 'functools[{"name": "now", "parameters": {}}]', calls=(NOW,)),
        Example(
            "two lists",
            f"functools{calls_of(Case('', (NOW,)))}\nfunctools{calls_of(Case('', (ADD,)))}",
            calls=(NOW, ADD),
            differs="the peer reads only one list",
        ),
        Example(
            "cut off",
            'functools[{"name": "get_weather", "arguments": {"city": "Par',
            open_call=("get_weather", '{"city": "Par'),
            differs="the peer reads everything as content",
        ),
        Example(
            "an empty list",
            "functools[] text",
            content="functools[] text",
            differs="the peer drops it",
        ),
        Example(
            "an empty element",
            "<|tool_call|>[]<|/tool_call|> text",
            content="text",
            differs="the peer keeps the tokens",
        ),
        Example("the module", "from functools import cache", content="from functools import cache"),
    ]
}
