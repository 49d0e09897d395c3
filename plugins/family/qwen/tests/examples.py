"""Outputs in the formats of Qwen and what they mean."""

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


def plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write(case: Case) -> str:
    calls = []
    for name, arguments in case.calls:
        parameters = "".join(
            f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        calls.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    return case.before + (case.between or "\n").join(calls) + case.after


def call(parameters: str, name: str = "get_weather") -> str:
    return f"<tool_call>\n<function={name}>\n{parameters}\n</function>\n</tool_call>"


NO_END = "the peer drops the last value when its end is missing"
TOOLS = [
    *rendered(write),
    Example("on one line", call("<parameter=city>Paris</parameter>"), calls=(PARIS,)),
    Example(
        "no tool_call tag",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
        calls=(PARIS,),
    ),
    Example(
        "two functions in one element",
        "<tool_call>\n<function=now>\n</function>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n40\n</parameter>\n"
        "</function>\n</tool_call>",
        calls=(NOW, ADD),
    ),
    Example(
        "a value without end",
        call("<parameter=a>2<parameter=b>40", "add"),
        calls=(ADD,),
        differs=NO_END,
    ),
    Example(
        "a string without end",
        call("<parameter=city>Paris<parameter=unit>c"),
        calls=(("get_weather", {"city": "Paris", "unit": "c"}),),
        differs=NO_END,
    ),
    Example("an empty element", "Well. <tool_call>\n</tool_call>", content="Well."),
    Example(
        "no end of value, function and element",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls=(PARIS, NOW),
        differs=NO_END,
    ),
    Example(
        "tags of the format in a value",
        call("<parameter=text>\na </tool_call> b <tool_call> c\n</parameter>", "write_file"),
        calls=(("write_file", {"text": "a </tool_call> b <tool_call> c"}),),
    ),
    Example(
        "a quoted end tag",
        'Split at "</tool_call>", please.',
        content='Split at "</tool_call>", please.',
    ),
    Example("blank lines", call("\n\n<parameter=city>\nParis\n</parameter>\n\n"), calls=(PARIS,)),
    Example(
        "newlines of the value",
        call("<parameter=city>\n\nParis\n\n</parameter>"),
        calls=(("get_weather", {"city": "\nParis\n"}),),
    ),
    Example(
        "unknown tool", call("<parameter=x>1</parameter>", "other"), calls=(("other", {"x": "1"}),)
    ),
    Example(
        "number for a string",
        call("<parameter=city>75001</parameter>"),
        calls=(("get_weather", {"city": "75001"}),),
    ),
    Example(
        "words for an integer",
        call("<parameter=a>two</parameter>", "add"),
        calls=(("add", {"a": "two"}),),
    ),
    Example(
        "an object as Python writes it",
        call("<parameter=filters>\n{'a': True, 'b': None}\n</parameter>", "search"),
        calls=(("search", {"filters": {"a": True, "b": None}}),),
        differs="the peer keeps a value that is not JSON as a string",
    ),
    Example(
        "True for a boolean",
        call("<parameter=flag>True</parameter>", "set_flag"),
        calls=(("set_flag", {"flag": True}),),
    ),
    Example(
        "text inside the call",
        call("hello\n<parameter=city>Paris</parameter>"),
        content="hello",
        calls=(PARIS,),
        differs="the peer drops text between parameters",
    ),
    Example(
        "cut off in a string",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        open_call=("get_weather", '{"city": "Par'),
    ),
    Example(
        "no call",
        "Write <tool_call> then <b>function</b>.",
        content="Write <tool_call> then <b>function</b>.",
        differs="the peer drops what follows a tag that begins no call",
    ),
]

OFF = {"enable_thinking": False}
THOUGHTS = ("Let me think.\nYes, 1 < 2.", '北京 {"a": 1}')
EXAMPLES = {
    ("tool_parser", "qwen3_coder"): TOOLS,
    ("tool_parser", "qwen3_xml"): TOOLS,
    ("reasoning_parser", "qwen3"): [
        *with_reasoning(
            rendered(write)[:30],
            lambda thought, text: f"<think>\n{thought}\n</think>\n\n{text}",
            THOUGHTS,
        ),
        *with_reasoning(
            rendered(write)[30:40], lambda thought, text: f"{thought}\n</think>\n\n{text}"
        ),
        Example("empty", "<think>\n\n</think>\n\nHello.", content="Hello."),
        Example("off", "Hello.", content="Hello.", template_kwargs=OFF),
        Example(
            "off, closed in the prompt",
            "Hello.",
            content="Hello.",
            template_kwargs=OFF,
            prompt_end="<think>\n\n</think>\n\n",
        ),
        Example(
            "opened in the prompt",
            "Hm.</think>Hello.",
            content="Hello.",
            reasoning="Hm.",
            prompt_end="<think>\n",
        ),
        Example("no end", "<think>Hm.", reasoning="Hm."),
        Example("only the end", "Hm.</think>", reasoning="Hm."),
        Example(
            "a call ends it",
            "<think>Hm.\n" + write(Case("", (PARIS,))),
            content=write(Case("", (PARIS,))),
            reasoning="Hm.",
        ),
        Example(
            "the end twice", "<think>Hm.</think></think>Hello.", content="Hello.", reasoning="Hm."
        ),
        Example(
            "the end again later",
            "Hm.</think>Well.\n</think>\nHello.",
            content="Well.\n\nHello.",
            reasoning="Hm.",
        ),
        Example(
            "the end as code",
            'Hm.</think>s.split("</think>")',
            content='s.split("</think>")',
            reasoning="Hm.",
        ),
        Example(
            "tags in the answer",
            "<think>Hm.</think>Use <think> and </think>.",
            content="Use <think> and </think>.",
            reasoning="Hm.",
        ),
    ],
}

PLAIN_IS_REASONING = {"qwen3"}
