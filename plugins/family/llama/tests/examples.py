"""Outputs in the formats of Llama and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import ADD, NOW, PARIS, Case, Example, rendered

TOKENS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")


def objects(case: Case) -> list[str]:
    return [
        json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
        for name, arguments in case.calls
    ]


def write_json(case: Case) -> str:
    return case.before + (case.between or "; ").join(objects(case)) + case.after


def write_tagged(case: Case) -> str:
    return (
        case.before
        + ("<|python_tag|>" if case.calls else "")
        + "; ".join(objects(case))
        + case.after
    )


def around(case: Case) -> str:
    return "the peer drops text around calls" if case.calls and case.content else ""


def behind(case: Case) -> str:
    return "with text after the list the peer finds no call" if case.calls and case.after else ""


def calls_of(case: Case) -> str:
    calls = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in case.calls
    ]
    return f"[{', '.join(calls)}]" if calls else ""


def write_python(case: Case) -> str:
    return case.before + calls_of(case) + case.after


def write_marked(case: Case) -> str:
    return f"<|python_start|>{calls_of(case)}<|python_end|>" if case.calls else case.before


JSON = [
    *rendered(write_json, differs=around),
    *rendered(write_tagged, has_between=False, differs=around)[:10],
    Example("arguments", '{"name": "add", "arguments": {"a": 2, "b": 40}}', calls=(ADD,)),
    Example(
        "type", '{"type": "function", "name": "add", "parameters": {"a": 2, "b": 40}}', calls=(ADD,)
    ),
    Example(
        "lines",
        '{\n  "name": "add",\n  "parameters": {\n    "a": 2,\n    "b": 40\n  }\n}',
        calls=(ADD,),
    ),
    Example(
        "arguments first",
        '{"parameters": {"city": "Paris"}, "name": "get_weather"}',
        calls=(PARIS,),
    ),
    Example("one per line", "\n".join(objects(Case("", (PARIS, ADD)))), calls=(PARIS, ADD)),
    Example(
        "between the tokens of Llama 4",
        f"<|python_start|>{write_json(Case('', (PARIS, NOW)))}<|python_end|>",
        calls=(PARIS, NOW),
    ),
    Example(
        "cut off",
        '{"name": "get_weather", "parameters": {"city": "Par',
        open_call=("get_weather", '{"city": "Par'),
        differs=(
            "the peer drops the last characters in a stream, and reads the whole text as content"
        ),
    ),
    Example("cut off before the name", '{"name": "get_', content='{"name": "get_'),
    Example(
        "arguments that are not JSON",
        '{"name": "x", "parameters": {invalid json}',
        content='{"name": "x", "parameters": {invalid json}',
    ),
    Example(
        "a broken call, a good one",
        '{"name": "x", "parameters": {invalid json}}; {"name": "now", "parameters": {}}',
        content='{"name": "x", "parameters": {invalid json}};',
        calls=(NOW,),
        differs="the peer gives up on the whole text",
    ),
    Example("a name alone", '{"name": "Ann", "age": 7}', content='{"name": "Ann", "age": 7}'),
    Example("code", "<|python_tag|>print(1)", content="<|python_tag|>print(1)"),
    Example(
        "other JSON, then a call",
        f'{{"a": 1}} {write_json(Case("", (ADD,)))}',
        content='{"a": 1}',
        calls=(ADD,),
        differs="the peer reads everything as content because one object has no name",
    ),
]

EXAMPLES = {
    ("tool_parser", "llama3_json"): JSON,
    ("tool_parser", "llama4_json"): JSON,
    ("tool_parser", "llama4_pythonic"): [
        *rendered(write_python, has_before=False, has_between=False, differs=behind),
        *rendered(write_marked, has_before=False, has_between=False, has_after=False),
        Example("lines", "[\n  add(a=2, b=40),\n  now()\n]", calls=(ADD, NOW)),
        Example("double quotes", '[get_weather(city="Paris")]', calls=(PARIS,)),
        Example(
            "words of JSON",
            "[set_flag(flag=true, note=null)]",
            calls=(("set_flag", {"flag": True, "note": None}),),
        ),
        Example(
            "text before the marker",
            "Let me see. <|python_start|>[now()]<|python_end|>",
            content="Let me see.",
            calls=(NOW,),
            differs="the peer looks only at the beginning",
        ),
        Example(
            "cut off",
            "[get_weather(city='Par",
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example("no list of calls", "[1, 2]", content="[1, 2]"),
        Example("a link", "[docs](https://example.com)", content="[docs](https://example.com)"),
        Example("no end", "[now()", calls=(NOW,)),
    ],
}
