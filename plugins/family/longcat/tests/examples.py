"""Outputs in the format of LongCat-Flash and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import ADD, NOW, PARIS, Case, Example, drops_text, rendered

TOKENS = ("<longcat_tool_call>", "</longcat_tool_call>")


def write(case: Case) -> str:
    calls = [
        "<longcat_tool_call>\n"
        f"{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}"
        "\n</longcat_tool_call>"
        for name, arguments in case.calls
    ]
    return case.before + (case.between or "\n").join(calls) + case.after


EXAMPLES = {
    ("tool_parser", "longcat"): [
        *rendered(write, differs=drops_text()),
        Example(
            "compact",
            '<longcat_tool_call>{"name":"add","arguments":{"a":2,"b":40}}</longcat_tool_call>',
            calls=(ADD,),
        ),
        Example(
            "arguments first",
            (
                '<longcat_tool_call>{"arguments": {"city": "Paris"}, "name": '
                '"get_weather"}</longcat_tool_call>'
            ),
            calls=(PARIS,),
        ),
        Example(
            "no end tag",
            '<longcat_tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}',
            calls=(ADD,),
        ),
        Example(
            "no arguments key",
            '<longcat_tool_call>{"name": "now"}</longcat_tool_call>',
            calls=(NOW,),
            differs="we read a call without arguments, the peer reads no call",
        ),
        Example(
            "raw newline in a string",
            (
                '<longcat_tool_call>{"name": "write_file", "arguments": {"text": '
                '"a\nb"}}</longcat_tool_call>'
            ),
            calls=(("write_file", {"text": "a\nb"}),),
            differs="not strict JSON: the peer finds no call; its stream returns broken JSON",
        ),
        Example(
            "cut off",
            'Now: <longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
            content="Now: ",
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example(
            "no call",
            "Write <longcat_tool_call> first.",
            content="Write <longcat_tool_call> first.",
        ),
        Example(
            "a broken call, a good one",
            f"<longcat_tool_call>{{name: add}}</longcat_tool_call>\n{write(Case('', (NOW,)))}",
            content="<longcat_tool_call>{name: add}</longcat_tool_call>",
            calls=(NOW,),
            differs="the peer gives up on the whole text",
        ),
    ]
}
