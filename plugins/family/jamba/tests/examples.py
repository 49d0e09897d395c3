"""Outputs in the format of Jamba and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import ADD, NOW, PARIS, Case, Example, drops_text, rendered

TOKENS = ("<tool_calls>", "</tool_calls>")


def calls_of(case: Case) -> list[str]:
    return [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in case.calls
    ]


def write(case: Case) -> str:
    lines = ",\n  ".join(calls_of(case))
    return case.before + (f"<tool_calls>[\n  {lines}\n]</tool_calls>" if lines else "") + case.after


EXAMPLES = {
    ("tool_parser", "jamba"): [
        *rendered(write, has_between=False, differs=drops_text()),
        Example(
            "on one line",
            f"<tool_calls>[{', '.join(calls_of(Case('', (NOW, ADD))))}]</tool_calls>",
            calls=(NOW, ADD),
        ),
        Example(
            "spaces",
            f"<tool_calls>\n[ {calls_of(Case('', (ADD,)))[0]} ]\n</tool_calls>",
            calls=(ADD,),
        ),
        Example(
            "arguments first",
            '<tool_calls>[{"arguments": {"city": "Paris"}, "name": "get_weather"}]</tool_calls>',
            calls=(PARIS,),
        ),
        Example(
            "two lists",
            f"{write(Case('', (NOW,)))}\n{write(Case('', (ADD,)))}",
            calls=(NOW, ADD),
            differs="the peer reads only one list",
        ),
        Example("no end tag", f"<tool_calls>[{calls_of(Case('', (ADD,)))[0]}]", calls=(ADD,)),
        Example(
            "cut off",
            'Well: <tool_calls>[{"name": "get_weather", "arguments": {"city": "Par',
            content="Well:",
            open_call=("get_weather", '{"city": "Par'),
            differs="the peer loses the key in a stream, and reads the whole text as content",
        ),
        Example(
            "no call",
            "Put it into <tool_calls>, please.",
            content="Put it into <tool_calls>, please.",
        ),
        Example(
            "not JSON", "<tool_calls>now()</tool_calls>", content="<tool_calls>now()</tool_calls>"
        ),
    ]
}
