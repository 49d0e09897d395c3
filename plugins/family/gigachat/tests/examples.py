"""Outputs in the formats of GigaChat 3 and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import ADD, NOW, PARIS, Case, Example, rendered

TOKENS = ("<|message_sep|>", "<|role_sep|>", "<|function_call|>", "</s>")


def calls_of(case: Case) -> list[str]:
    return [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in case.calls
    ]


def write(case: Case) -> str:
    calls = [f"<|message_sep|>\n\nfunction call<|role_sep|>\n{call}" for call in calls_of(case)]
    return case.before + case.between.join(calls) + case.after


def write_31(case: Case) -> str:
    return (
        case.before
        + case.between.join(f"<|function_call|>{call}" for call in calls_of(case))
        + case.after
    )


def differs(case: Case) -> str:
    if len(case.calls) > 1:
        return "the peer reads only one call"
    return "the peer reads no text after a call" if case.calls and case.after else ""


EXAMPLES = {
    ("tool_parser", "gigachat3"): [
        *rendered(write, differs=differs),
        *rendered(write_31, is_parallel=False, has_after=False),
        Example(
            "no separator",
            f"function call<|role_sep|>\n{calls_of(Case('', (ADD,)))[0]}",
            calls=(ADD,),
            differs="the role is also content for the peer",
        ),
        Example(
            "with the end",
            f"{write(Case('', (PARIS,), before='Well.'))}</s>",
            content="Well.",
            calls=(PARIS,),
        ),
        Example(
            "closed",
            f"{write(Case('', (NOW,)))}<|message_sep|>\n\n",
            calls=(NOW,),
            differs="the peer allows nothing after the call",
        ),
        Example(
            "lines",
            '<|function_call|>{\n  "name": "add",\n  "arguments": {"a": 2, "b": 40}\n}',
            calls=(ADD,),
        ),
        Example(
            "cut off",
            (
                'Well.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", '
                '"arguments": {"city": "Par'
            ),
            content="Well.",
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example(
            "not JSON",
            "function call<|role_sep|>\nnow()",
            content="function call<|role_sep|>\nnow()",
        ),
        Example(
            "no call",
            "One.<|message_sep|>Two.",
            content="One.<|message_sep|>Two.",
        ),
    ]
}
