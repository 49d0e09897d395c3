"""Outputs in the formats of DeepSeek and what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable

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

SECTION = "<｜tool▁calls▁begin｜>"
SECTION_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
TOKENS = (SECTION, SECTION_END, CALL, CALL_END, SEPARATOR, "<think>", "</think>")


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def section(calls: list[str], between: str = "") -> str:
    return SECTION + between.join(calls) + SECTION_END if calls else ""


def v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEPARATOR}{arguments}{CALL_END}"


def v32(name: str, arguments: dict[str, object]) -> str:
    parameters = [
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else dumped(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    ]
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parameters)}</｜DSML｜invoke>\n'


def write(one: Callable[[str, str], str], separator: str) -> Callable[[Case], str]:
    def write_case(case: Case) -> str:
        calls = [one(name, dumped(arguments)) for name, arguments in case.calls]
        return case.before + section(calls, case.between or separator) + case.after

    return write_case


def write_tags(case: Case) -> str:
    calls = [v32(name, arguments) for name, arguments in case.calls]
    if not calls:
        return case.before + case.after
    block = f"<｜DSML｜function_calls>\n{case.between.join(calls)}</｜DSML｜function_calls>"
    return case.before + block + case.after


LINES = "the peer reads only arguments on one line"
CITY = '{"city": "Paris"}'
EMPTY_V3 = [
    Example(
        "no call",
        f"The token {SECTION} begins calls.",
        content=f"The token {SECTION} begins calls.",
        differs="the peer drops it",
    ),
    Example(
        "cut off before the name",
        f"{SECTION}{CALL}func",
        content=f"{SECTION}{CALL}func",
        differs="the peer drops it",
    ),
]
WRAPPED = "<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>"

CONTROL = {
    ("tool_parser", "deepseek_v32"): (
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="',
        "</｜DSML｜parameter>",
    )
}
EXAMPLES = {
    ("tool_parser", "deepseek_v3"): [
        *rendered(write(v3, "\n")),
        *EMPTY_V3,
        Example(
            "indented",
            section([v3("add", '{\n  "a": 2,\n  "b": 40\n}')]),
            calls=(ADD,),
            differs=LINES,
        ),
        Example(
            "no section",
            v3("get_weather", CITY),
            calls=(PARIS,),
            differs="the peer needs the section",
        ),
        Example("no section end", SECTION + v3("get_weather", CITY), calls=(PARIS,)),
        Example(
            "no fence",
            f"{SECTION}{CALL}function{SEPARATOR}now\n```json\n{{}}{CALL_END}{SECTION_END}",
            calls=(NOW,),
        ),
        Example(
            "cut off",
            f'{SECTION}{CALL}function{SEPARATOR}get_weather\n```json\n{{"city": "Par',
            open_call=("get_weather", '{"city": "Par'),
        ),
    ],
    ("tool_parser", "deepseek_v31"): [
        *rendered(write(v31, "")),
        *EMPTY_V3,
        Example(
            "indented",
            section([v31("add", '{\n  "a": 2,\n  "b": 40\n}')]),
            calls=(ADD,),
            differs=LINES,
        ),
        Example(
            "lines between",
            section([v31("now", "{}"), v31("add", '{"a": 2, "b": 40}')], "\n"),
            calls=(NOW, ADD),
        ),
        Example(
            "no section",
            v31("get_weather", CITY),
            calls=(PARIS,),
            differs="the peer needs the section",
        ),
        Example("no section end", SECTION + v31("get_weather", CITY), calls=(PARIS,)),
        Example(
            "cut off",
            f'{SECTION}{CALL}get_weather{SEPARATOR}{{"city": "Par',
            open_call=("get_weather", '{"city": "Par'),
        ),
    ],
    ("tool_parser", "deepseek_v32"): [
        *rendered(write_tags, differs=drops_text()),
        Example(
            "a number as a string",
            WRAPPED.format(
                '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" '
                'string="true">2</｜DSML｜parameter>\n</｜DSML｜invoke>'
            ),
            calls=(("add", {"a": "2"}),),
            differs="the format says that it is a string, but the peer follows the schema",
        ),
        Example(
            "no string attribute",
            WRAPPED.format(
                '<｜DSML｜invoke name="add">\n<｜DSML｜parameter '
                'name="a">2</｜DSML｜parameter>\n</｜DSML｜invoke>'
            ),
            calls=(("add", {"a": 2}),),
        ),
        Example("no wrapper", v32("get_weather", {"city": "Paris"}), calls=(PARIS,)),
        Example(
            "no end of the call",
            write_tags(Case("", (PARIS, NOW))).replace("</｜DSML｜invoke>\n", ""),
            calls=(PARIS, NOW),
            differs="the peer needs the end",
        ),
        Example(
            "no end of a parameter",
            write_tags(Case("", (("get_weather", {"city": "Paris", "unit": "c"}),))).replace(
                "</｜DSML｜parameter>\n", ""
            ),
            calls=(("get_weather", {"city": "Paris", "unit": "c"}),),
            differs="the peer needs the end",
        ),
        Example(
            "no end at all before the next call",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
            'name="city" string="true">Paris<｜DSML｜invoke '
            'name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            calls=(PARIS, NOW),
            differs="the peer needs the end",
        ),
        Example(
            "only the call is complete",
            (
                '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
                'string="true">Paris</｜DSML｜parameter>\n'
            ),
            open_call=("get_weather", '{"city": "Paris"}'),
        ),
        Example("an empty section", WRAPPED.format("")),
        Example(
            "broken JSON",
            WRAPPED.format(
                '<｜DSML｜invoke name="search">\n'
                '<｜DSML｜parameter name="tags" string="false">[1, '
                "</｜DSML｜parameter>\n</｜DSML｜invoke>"
            ),
            calls=(("search", {"tags": "[1, "}),),
        ),
        Example(
            "cut off",
            (
                '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
                'name="city" string="true">Par'
            ),
            open_call=("get_weather", '{"city": "Par'),
            differs="the peer drops the part of the value that is there",
        ),
        Example(
            "no call",
            "<｜DSML｜function_calls> it is.",
            content="<｜DSML｜function_calls> it is.",
            differs="the peer drops it",
        ),
    ],
    ("reasoning_parser", "deepseek_r1"): [
        *with_reasoning(
            rendered(write(v3, ""))[:30],
            lambda thought, text: f"<think>\n{thought}\n</think>\n\n{text}",
        ),
        *with_reasoning(
            rendered(write(v3, ""))[20:50], lambda thought, text: f"{thought}\n</think>\n\n{text}"
        ),
        Example("empty", "<think>\n\n</think>\n\nHello.", content="Hello."),
        Example(
            "opened in the prompt",
            "Hm.</think>Hello.",
            content="Hello.",
            reasoning="Hm.",
            prompt_end="<think>\n",
        ),
        Example("no end", "<think>Hm.", reasoning="Hm."),
        Example("neither", "Hm.", reasoning="Hm."),
        Example("only the end", "Hm.</think>", reasoning="Hm."),
        Example(
            "tags in the answer",
            "<think>Hm.</think>Use <think> and </think>.",
            content="Use <think> and </think>.",
            reasoning="Hm.",
        ),
    ],
    ("reasoning_parser", "deepseek_v3"): [
        Example(
            example.name,
            example.text,
            example.content,
            example.reasoning,
            template_kwargs={"thinking": True},
        )
        for example in with_reasoning(
            rendered(write(v31, ""))[:30], lambda thought, text: f"<think>{thought}</think>{text}"
        )
    ]
    + [
        Example(f"off, {example.name}", example.text, example.text)
        for example in rendered(write(v31, ""))[20:50]
    ]
    + [
        Example("off, tags", "<think>Hm.</think>Hello.", content="<think>Hm.</think>Hello."),
        Example(
            "off, closed in the prompt",
            "Hello.",
            content="Hello.",
            prompt_end="<｜Assistant｜></think>",
        ),
        Example(
            "opened in the prompt",
            "Hm.</think>Hi.",
            content="Hi.",
            reasoning="Hm.",
            template_kwargs={"thinking": True},
            prompt_end="<think>",
        ),
        Example(
            "enable_thinking",
            "Hm.</think>Hi.",
            content="Hi.",
            reasoning="Hm.",
            template_kwargs={"enable_thinking": True},
        ),
    ],
}

PLAIN_IS_REASONING = {"deepseek_r1"}
