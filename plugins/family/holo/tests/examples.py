"""Outputs in the format of Holo2 and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import Case, Example, rendered, with_reasoning


def write(case: Case) -> str:
    calls = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}"
        "\n</tool_call>"
        for name, arguments in case.calls
    ]
    return case.before + (case.between or "\n").join(calls) + case.after


OFF = {"thinking": False}
THOUGHTS = ("Let me think.\nYes, 1 < 2.", '北京 {"a": 1}')

EXAMPLES = {
    ("reasoning_parser", "holo2"): [
        *with_reasoning(
            rendered(write)[:30],
            lambda thought, text: f"<think>\n{thought}\n</think>\n\n{text}",
            THOUGHTS,
        ),
        *with_reasoning(
            rendered(write)[30:40], lambda thought, text: f"{thought}\n</think>\n\n{text}"
        ),
        *[
            Example(f"off, {example.name}", example.text, example.text, template_kwargs=OFF)
            for example in rendered(write)[40:50]
        ],
        Example("empty", "<think>\n\n</think>\n\nHello.", content="Hello."),
        Example(
            "off, tags",
            "<think>Hm.</think>Hello.",
            content="<think>Hm.</think>Hello.",
            template_kwargs=OFF,
        ),
        Example(
            "off, only the end",
            "Hi</think> there.",
            content="Hi</think> there.",
            template_kwargs=OFF,
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
    ],
}

PLAIN_IS_REASONING = {"holo2"}
