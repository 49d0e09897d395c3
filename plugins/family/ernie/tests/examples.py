"""Outputs in the format of ERNIE 4.5 Thinking and what they mean."""

from __future__ import annotations

import json

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

TOKENS = ("<think>", "</think>", "<response>", "</response>", "<tool_call>", "</tool_call>")


def write(case: Case) -> str:
    calls = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}"
        "\n</tool_call>\n"
        for name, arguments in case.calls
    ]
    return case.before + case.between.join(calls) + case.after


THOUGHTS = ("Let me think.\nYes, 1 < 2.", '北京 {"a": 1}')
CALL = write(Case("", (PARIS,)))
TEXT = rendered(write)

EXAMPLES = {
    ("tool_parser", "ernie45"): [
        *rendered(write, differs=drops_text()),
        Example(
            "compact",
            '<tool_call>{"name":"add","arguments":{"a":2,"b":40}}</tool_call>',
            calls=(ADD,),
        ),
        Example(
            "arguments first",
            '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
            calls=(PARIS,),
        ),
        Example("no arguments key", '<tool_call>\n{"name": "now"}\n</tool_call>', calls=(NOW,)),
        Example(
            "no end tag",
            '<tool_call>\n{"name": "now", "arguments": {}}\n',
            calls=(NOW,),
            differs="the peer needs the end tag",
        ),
        Example(
            "a broken call, a good one",
            (
                '<tool_call>\n{name: add}\n</tool_call>\n<tool_call>\n{"name": "now", '
                '"arguments": {}}\n</tool_call>'
            ),
            content="<tool_call>\n{name: add}\n</tool_call>",
            calls=(NOW,),
            differs="the peer gives up on the whole text",
        ),
        Example(
            "cut off",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
            open_call=("get_weather", '{"city": "Par'),
            differs="the peer needs the end tag",
        ),
        Example(
            "no call",
            "The tag <tool_call> begins calls.",
            content="The tag <tool_call> begins calls.",
            differs="the peer drops what follows a tag that begins no call",
        ),
    ],
    ("reasoning_parser", "ernie45"): [
        *with_reasoning(
            [example for example in TEXT if not example.calls],
            lambda thought, text: f"{thought}\n</think>\n\n<response>\n{text}\n</response>\n",
            THOUGHTS,
        ),
        *with_reasoning(
            TEXT[:30], lambda thought, text: f"<think>\n{thought}\n</think>\n\n{text}", THOUGHTS
        ),
        Example("empty", "\n</think>\n\n<response>\nHello.\n</response>\n", content="Hello."),
        Example(
            "opened in the prompt",
            "Hm.</think>Hello.",
            content="Hello.",
            reasoning="Hm.",
            prompt_end="<think>\n",
        ),
        Example("no end", "Hm.", reasoning="Hm.", prompt_end="<think>\n"),
        Example(
            "no end of the response",
            "Hm.\n</think>\n\n<response>\nHello.",
            content="Hello.",
            reasoning="Hm.",
            differs="the peer leaves the tag when its end is missing",
        ),
        Example("only the end", "Hm.\n</think>", reasoning="Hm."),
        Example("a call after it", f"Hm.\n</think>\n\n\n{CALL}", content=CALL, reasoning="Hm."),
    ],
}

PLAIN_IS_REASONING = {"ernie45"}
