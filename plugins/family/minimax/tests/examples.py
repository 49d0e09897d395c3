"""Outputs in the formats of MiniMax and what they mean."""

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

TOKENS = ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")


def plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_m1(case: Case) -> str:
    """Text between calls is written between two sections."""
    calls = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in case.calls
    ]
    sections = calls if case.between else ["\n".join(calls)] if calls else []
    return (
        case.before
        + case.between.join(f"<tool_calls>\n{section}\n</tool_calls>" for section in sections)
        + case.after
    )


def invoke(name: str, arguments: dict[str, object]) -> str:
    parameters = "".join(
        f'<parameter name="{key}">{plain(value)}</parameter>\n' for key, value in arguments.items()
    )
    return f'<invoke name="{name}">\n{parameters}</invoke>\n'


def write_m2(case: Case) -> str:
    calls = [invoke(name, arguments) for name, arguments in case.calls]
    sections = calls if case.between else ["".join(calls)] if calls else []
    text = case.between.join(
        f"<minimax:tool_call>\n{section}</minimax:tool_call>" for section in sections
    )
    return case.before + text + case.after


def section(text: str) -> str:
    return f"<minimax:tool_call>\n{text}\n</minimax:tool_call>"


M1_CALL = '<tool_calls>\n{"name": "now", "arguments": {}}\n</tool_calls>'
THOUGHTS = ("Let me think.\nYes, 1 < 2.", '北京 {"a": 1}')
IN_PROMPT = "]~b]ai\n<think>\n"
CALL = write_m2(Case("", (PARIS,)))

EXAMPLES = {
    ("tool_parser", "minimax"): [
        *rendered(write_m1),
        Example(
            "on one line", '<tool_calls>{"name":"now","arguments":{}}</tool_calls>', calls=(NOW,)
        ),
        Example("no arguments key", '<tool_calls>\n{"name": "now"}\n</tool_calls>', calls=(NOW,)),
        Example("no end tag", '<tool_calls>\n{"name": "now", "arguments": {}}\n', calls=(NOW,)),
        Example(
            "a broken call after a good one",
            '<tool_calls>\n{"name": "now", "arguments": {}}\n{name: add}\n</tool_calls>',
            content="{name: add}",
            calls=(NOW,),
        ),
        Example(
            "a broken call between good ones",
            '<tool_calls>\n{"name": "now", "arguments": {}}\n{invalid json here}\n'
            '{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_calls>',
            content="{invalid json here}",
            calls=(NOW, ADD),
        ),
        Example("an empty section", "Yes. <tool_calls>\n</tool_calls>", content="Yes."),
        Example(
            "a call that the reasoning quotes",
            f"<think>I could write {M1_CALL}, or not.</think>\n{M1_CALL}",
            content=f"<think>I could write {M1_CALL}, or not.</think>",
            calls=(NOW,),
        ),
        Example(
            "cut off",
            '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Par',
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example(
            "no call",
            "The tag <tool_calls> begins calls.",
            content="The tag <tool_calls> begins calls.",
        ),
    ],
    ("tool_parser", "minimax_m2"): [
        *rendered(write_m2),
        Example(
            "lines around a value",
            section(
                '<invoke name="get_weather">\n<parameter '
                'name="city">\nParis\n</parameter>\n</invoke>'
            ),
            calls=(("get_weather", {"city": "\nParis\n"}),),
        ),
        Example(
            "on one line",
            '<minimax:tool_call><invoke name="add"><parameter name="a">2</parameter><parameter '
            'name="b">40</parameter></invoke>'
            "</minimax:tool_call>",
            calls=(ADD,),
        ),
        Example(
            "number for a string",
            section(invoke("get_weather", {"city": 75001})),
            calls=(("get_weather", {"city": "75001"}),),
        ),
        Example(
            "words for an integer",
            section(invoke("add", {"a": "two"})),
            calls=(("add", {"a": "two"}),),
        ),
        Example(
            "True for a boolean",
            section(invoke("set_flag", {"flag": "True"})),
            calls=(("set_flag", {"flag": True}),),
        ),
        Example(
            "unknown tool",
            section(invoke("other", {"x": 1})),
            calls=(("other", {"x": "1"}),),
            differs="the peer drops calls of tools that the request does not have",
        ),
        Example("no section end", "<minimax:tool_call>\n" + invoke("now", {}), calls=(NOW,)),
        Example("an empty section", "Yes. " + section(""), content="Yes."),
        Example("no section", invoke("get_weather", {"city": "Paris"}), calls=(PARIS,)),
        Example(
            "cut off in a string",
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Par',
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example(
            "no call",
            "The tag <minimax:tool_call> begins calls.",
            content="The tag <minimax:tool_call> begins calls.",
            differs="the peer drops what follows a tag that begins no call",
        ),
    ],
    ("reasoning_parser", "minimax_m2"): [
        *with_reasoning(
            rendered(write_m2)[:32],
            lambda thought, text: f"{thought}\n</think>\n\n{text}",
            THOUGHTS,
        ),
        *with_reasoning(
            rendered(write_m2)[32:40],
            lambda thought, text: f"<think>\n{thought}\n</think>\n\n{text}",
        ),
        Example("empty", "\n</think>\n\nHello.", content="Hello."),
        Example(
            "opened in the prompt",
            "Hm.</think>Hello.",
            content="Hello.",
            reasoning="Hm.",
            prompt_end=IN_PROMPT,
        ),
        Example("no end", "Hm.", reasoning="Hm.", prompt_end=IN_PROMPT),
        Example("only the end", "Hm.</think>", reasoning="Hm."),
        Example("a call after it", "Hm.\n</think>\n" + CALL, content=CALL, reasoning="Hm."),
    ],
    ("reasoning_parser", "minimax_m2_append_think"): [
        Example(example.name, example.text, content="<think>" + example.text, prompt_end=IN_PROMPT)
        for example in with_reasoning(
            rendered(write_m2)[:40],
            lambda thought, text: f"{thought}\n</think>\n\n{text}",
            THOUGHTS,
        )
    ],
}

PLAIN_IS_REASONING = {"minimax_m2"}
