"""Outputs in the format of InternLM and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import ADD, NOW, PARIS, Case, Example, rendered

TOKENS = ("<|action_start|>", "<|action_end|>", "<|plugin|>", "<|interpreter|>")


def write(case: Case) -> str:
    calls = [
        "<|action_start|><|plugin|>\n"
        f"{json.dumps({'name': name, 'parameters': arguments}, ensure_ascii=False)}"
        "<|action_end|>"
        for name, arguments in case.calls
    ]
    return case.before + case.between.join(calls) + case.after


def differs(case: Case) -> str:
    if len(case.calls) > 1:
        return "the peer reads one call"
    return "the peer drops text after a call" if case.calls and case.after else ""


EXAMPLES = {
    ("tool_parser", "internlm"): [
        *rendered(write, differs=differs),
        Example(
            "lines",
            (
                '<|action_start|><|plugin|>\n{\n "name": "now",\n "parameters": '
                "{}\n}\n<|action_end|>\n"
            ),
            calls=(NOW,),
        ),
        Example(
            "arguments",
            (
                '<|action_start|><|plugin|>{"name": "add", "arguments": {"a": 2, "b": '
                "40}}<|action_end|>"
            ),
            calls=(ADD,),
        ),
        Example(
            "arguments first",
            (
                '<|action_start|><|plugin|>{"parameters": {"city": "Paris"}, "name": '
                '"get_weather"}<|action_end|>'
            ),
            calls=(PARIS,),
        ),
        Example(
            "no arguments key",
            '<|action_start|><|plugin|>\n{"name": "now"}<|action_end|>',
            calls=(NOW,),
        ),
        Example(
            "no end", '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}', calls=(NOW,)
        ),
        Example(
            "cut off",
            'Well.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Par',
            content="Well.",
            open_call=("get_weather", '{"city": "Par'),
            differs="the peer raises an error, its stream drops the last characters",
        ),
        Example(
            "interpreter",
            "<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
            content="<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
        ),
        Example(
            "not JSON",
            "<|action_start|><|plugin|>\nnow()<|action_end|>",
            content="<|action_start|><|plugin|>\nnow()<|action_end|>",
            differs="the peer raises an error",
        ),
    ]
}
