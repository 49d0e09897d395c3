"""Outputs in the format of FunctionGemma and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import ADD, NOW, PARIS, Case, Example, rendered

START = "<start_function_call>"
END = "<end_function_call>"
TOKENS = (START, END, "<escape>")


def written(value: object) -> str:
    if isinstance(value, str):
        return f"<escape>{value}<escape>"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def write(case: Case) -> str:
    calls = [f"{START}call:{name}{written(arguments)}{END}" for name, arguments in case.calls]
    return case.before + case.between.join(calls) + case.after


def call(arguments: str, name: str = "get_weather") -> str:
    return f"{START}call:{name}{{{arguments}}}{END}"


ONLY = "the peer reads only values between <escape>"


def beyond_strings(case: Case) -> str:
    values = [value for _, arguments in case.calls for value in arguments.values()]
    if not all(isinstance(value, str) for value in values):
        return ONLY
    return "the peer reads a string that contains JSON as JSON" if any(map(is_json, values)) else ""


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


EXAMPLES = {
    ("tool_parser", "functiongemma"): [
        *rendered(write, differs=beyond_strings),
        Example(
            "spaces",
            f"{START} call:add {{ a: 2, b: 40 }} {END}",
            calls=(ADD,),
            differs="the peer does not allow spaces",
        ),
        Example("no end", f"{START}call:now{{}}", calls=(NOW,)),
        Example("a bare word for a string", call("city:Paris"), calls=(PARIS,), differs=ONLY),
        Example(
            "number for a string",
            call("city:75001"),
            calls=(("get_weather", {"city": "75001"}),),
            differs=ONLY,
        ),
        Example(
            "words for an integer",
            call("a:two", "add"),
            calls=(("add", {"a": "two"}),),
            differs=ONLY,
        ),
        Example(
            "lines in a list",
            call("tags:[\n<escape>a<escape>,\n<escape>b<escape>\n]", "search"),
            calls=(("search", {"tags": ["a", "b"]}),),
            differs=ONLY,
        ),
        Example(
            "escaped keys",
            call("<escape>city<escape>:<escape>Paris<escape>"),
            calls=(PARIS,),
            differs="the peer knows only bare keys",
        ),
        Example(
            "cut off in a string",
            f"{START}call:get_weather{{city:<escape>Par",
            open_call=("get_weather", '{"city": "Par'),
            differs="the peer drops the part of the value that is there",
        ),
        Example(
            "cut off in a number",
            f"{START}call:add{{a:2,b:4",
            content=",b:4",
            open_call=("add", '{"a": 2}'),
            differs=ONLY,
        ),
        Example("cut off before the name", f"{START}call:get_", content=f"{START}call:get_"),
        Example(
            "no call",
            f"The token {START} begins calls.",
            content=f"The token {START} begins calls.",
        ),
    ]
}
