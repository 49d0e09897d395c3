"""Outputs in the format of Step3 and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import (
    ADD,
    NOW,
    PARIS,
    Case,
    Example,
    rendered,
    with_reasoning,
)

SECTION = "<｜tool_calls_begin｜>"
SECTION_END = "<｜tool_calls_end｜>"
CALL = "<｜tool_call_begin｜>"
CALL_END = "<｜tool_call_end｜>"
SEPARATOR = "<｜tool_sep｜>"
TOKENS = (SECTION, SECTION_END, CALL, CALL_END, SEPARATOR, "<think>", "</think>")


def plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def invoke(name: str, arguments: dict[str, object]) -> str:
    parameters = "".join(
        f'<steptml:parameter name="{key}">{plain(value)}</steptml:parameter>\n'
        for key, value in arguments.items()
    )
    return (
        f"{CALL}function{SEPARATOR}<steptml:invoke "
        f'name="{name}">\n{parameters}</steptml:invoke>{CALL_END}'
    )


def write(case: Case) -> str:
    calls = [invoke(name, arguments) for name, arguments in case.calls]
    section = f"{SECTION}\n{(case.between or chr(10)).join(calls)}\n{SECTION_END}" if calls else ""
    return case.before + section + case.after


def differs(case: Case) -> str:
    values = [value for _, arguments in case.calls for value in arguments.values()]
    if any(value is None or isinstance(value, dict | list) for value in values):
        return "the peer keeps objects, lists and null as strings"
    if any(isinstance(value, str) and ("<" in value or value != value.strip()) for value in values):
        return "the peer drops a value with < in it, and white space at a value's ends"
    return "the peer drops text between calls" if case.between else ""


PARIS_CALL = invoke("get_weather", {"city": "Paris"})
THOUGHTS = ("Let me think.\nYes, 1 < 2.", '北京 {"a": 1}')

EXAMPLES = {
    ("tool_parser", "step3"): [
        *rendered(write, differs=differs),
        Example(
            "dense", f"{SECTION}{PARIS_CALL}{invoke('now', {})}{SECTION_END}", calls=(PARIS, NOW)
        ),
        Example(
            "number for a string",
            write(Case("", (("get_weather", {"city": "75001"}),))),
            calls=(("get_weather", {"city": "75001"}),),
        ),
        Example(
            "words for an integer",
            write(Case("", (("add", {"a": "two"}),))),
            calls=(("add", {"a": "two"}),),
        ),
        Example(
            "True for a boolean",
            write(Case("", (("set_flag", {"flag": "True"}),))),
            calls=(("set_flag", {"flag": True}),),
        ),
        Example(
            "no function and separator",
            write(Case("", (PARIS, NOW))).replace(f"function{SEPARATOR}", ""),
            calls=(PARIS, NOW),
            differs="the peer needs the separator",
        ),
        Example("an empty section", f"Yes. {SECTION}{SECTION_END}", content="Yes."),
        Example("no section", PARIS_CALL, calls=(PARIS,), differs="the peer needs the section"),
        Example(
            "no section end",
            SECTION + PARIS_CALL,
            calls=(PARIS,),
            differs="the peer needs the section's end",
        ),
        Example(
            "no call end",
            write(Case("", (ADD,))).replace(CALL_END, ""),
            calls=(ADD,),
            differs="the peer needs the call's end",
        ),
        Example(
            "cut off",
            (
                f"{SECTION}\n{CALL}function{SEPARATOR}<steptml:invoke "
                'name="get_weather">\n<steptml:parameter name="city">Par'
            ),
            open_call=("get_weather", '{"city": "Par'),
            differs="the peer needs the section's end",
        ),
        Example(
            "no call",
            f"The token {SECTION} begins calls.",
            content=f"The token {SECTION} begins calls.",
        ),
    ],
    ("reasoning_parser", "step3"): [
        *with_reasoning(
            rendered(write)[:32], lambda thought, text: f"{thought}\n</think>\n\n{text}", THOUGHTS
        ),
        Example(
            "the start again",
            "<think>Hm.</think>Hello.",
            content="Hello.",
            reasoning="Hm.",
            differs="the peer leaves the tag in the reasoning",
        ),
        Example("empty", "\n</think>\n\nHello.", content="Hello."),
        Example(
            "opened in the prompt",
            "Hm.</think>Hello.",
            content="Hello.",
            reasoning="Hm.",
            prompt_end="<think>\n",
        ),
        Example("no end", "Hm.", reasoning="Hm.", prompt_end="<think>\n"),
        Example("only the end", "Hm.</think>", reasoning="Hm."),
    ],
}

PLAIN_IS_REASONING = {"step3"}
