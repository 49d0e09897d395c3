"""Outputs in the format of Hermes and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import ADD, NOW, PARIS, Case, Example, drops_text, rendered


def write(case: Case) -> str:
    calls = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}"
        "\n</tool_call>"
        for name, arguments in case.calls
    ]
    return case.before + (case.between or "\n").join(calls) + case.after


EXAMPLES = {
    ("tool_parser", "hermes"): [
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
        Example(
            "indented",
            (
                '<tool_call>\n{\n  "name": "get_weather",\n  "arguments": {\n    "city": '
                '"Paris"\n  }\n}\n</tool_call>'
            ),
            calls=(PARIS,),
        ),
        Example(
            "no end tag",
            'Yes. <tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}',
            content="Yes. ",
            calls=(ADD,),
        ),
        Example(
            "escapes",
            (
                '<tool_call>{"name": "get_weather", "arguments": {"city": '
                '"\\u0050ar\\u0069s"}}</tool_call>'
            ),
            calls=(PARIS,),
        ),
        Example(
            "no arguments key",
            '<tool_call>{"name": "now"}</tool_call>',
            calls=(NOW,),
            differs="we read a call without arguments, the peer reads no call",
        ),
        Example(
            "list",
            (
                '<tool_call>[{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": '
                '2, "b": 40}}]</tool_call>'
            ),
            calls=(NOW, ADD),
            differs="the peer reads one object per element",
        ),
        Example(
            "arguments as a string",
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": 40}"}</tool_call>',
            calls=(ADD,),
            differs="the peer returns a JSON string instead of an object",
        ),
        Example(
            "raw newline in a string",
            '<tool_call>{"name": "write_file", "arguments": {"text": "a\nb"}}</tool_call>',
            calls=(("write_file", {"text": "a\nb"}),),
            differs="not strict JSON: the peer finds no call; its stream returns broken JSON",
        ),
        Example(
            "cut off",
            'Now: <tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
            content="Now: ",
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example(
            "cut off before the name",
            '<tool_call>\n{"name": "get_',
            content='<tool_call>\n{"name": "get_',
        ),
        Example(
            "no call",
            "Write <tool_call> and </tool_call> around it.",
            content="Write <tool_call> and </tool_call> around it.",
        ),
        Example("an empty element", "Yes. <tool_call>\n</tool_call>", content="Yes."),
        Example("a lone end tag", "Yes.</tool_call>", content="Yes.", differs="the peer leaves it"),
        Example(
            "a string without an end, a good call",
            (
                '<tool_call>{"name": "get_weather", "arguments": {"city": '
                '"Paris</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
            ),
            calls=(PARIS, NOW),
            differs="the peer gives up on the whole text",
        ),
        Example(
            "no closing brace",
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}</tool_call>',
            calls=(PARIS,),
        ),
        Example(
            "a broken call in a list",
            (
                '<tool_call>[{"name": "x", "arguments": {1: 2}}, {"name": "now", "arguments": '
                "{}}]</tool_call>"
            ),
            content='<tool_call>[{"name": "x", "arguments": {1: 2}},',
            calls=(NOW,),
            differs="the peer reads one object per element",
        ),
        Example(
            "a broken call, a good one",
            (
                '<tool_call>{name: add}</tool_call>\n<tool_call>{"name": "now", "arguments": '
                "{}}</tool_call>"
            ),
            content="<tool_call>{name: add}</tool_call>",
            calls=(NOW,),
            differs="the peer gives up on the whole text",
        ),
    ]
}
