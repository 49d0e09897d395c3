"""Outputs in the pythonic format and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import ADD, NOW, PARIS, Case, Example, rendered


def write(case: Case) -> str:
    calls = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in case.calls
    ]
    return case.before + (f"[{', '.join(calls)}]" if calls else "") + case.after


def write_json_values(case: Case) -> str:
    calls = []
    for name, arguments in case.calls:
        words = (
            f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()
        )
        calls.append(f"{name}({', '.join(words)})")
    return f"[{', '.join(calls)}]" if calls else case.before


def behind(case: Case) -> str:
    return "with text after the list the peer finds no call" if case.calls and case.after else ""


EXAMPLES = {
    ("tool_parser", "pythonic"): [
        *rendered(write, has_before=False, has_between=False, differs=behind),
        *rendered(write_json_values, has_before=False, has_between=False, has_after=False)[:40],
        Example("lines", "[\n    add(a=2, b=40),\n    now()\n]", calls=(ADD, NOW)),
        Example("double quotes", '[get_weather(city="Paris")]', calls=(PARIS,)),
        Example(
            "words of JSON",
            "[set_flag(flag=true, note=null)]",
            calls=(("set_flag", {"flag": True, "note": None}),),
        ),
        Example(
            "two lists",
            "[now()]\n[add(a=2, b=40)]",
            calls=(NOW, ADD),
            differs="the peer reads only one list and ignores the rest",
        ),
        Example(
            "cut off",
            "[get_weather(city='Par",
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example("no list of calls", "[1, 2]", content="[1, 2]"),
        Example("a link", "[docs](https://example.com)", content="[docs](https://example.com)"),
        Example("positional", "[add(2, 40)]", content="[add(2, 40)]"),
        Example("no end", "[now()", calls=(NOW,)),
    ]
}
