"""Outputs in the formats of GLM and what they mean."""

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


def write(case: Case, line: str = "\n") -> str:
    """line: the text between the parts; GLM-4.7 writes none."""
    calls = []
    for name, arguments in case.calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{plain(value)}</arg_value>{line}"
            for key, value in arguments.items()
        )
        calls.append(f"<tool_call>{name}{line}{pairs}</tool_call>")
    return case.before + (case.between or line).join(calls) + case.after


def write_dense(case: Case) -> str:
    return write(case, "")


QUIRKS = [
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
        "<tool_call>set_flag\n<arg_key>flag</arg_key>\n<arg_value>True</arg_value>\n</tool_call>",
        calls=(("set_flag", {"flag": True}),),
    ),
    Example(
        "an object as Python writes it",
        (
            "<tool_call>search\n<arg_key>filters</arg_key>\n<arg_value>{'a': [1, "
            "None]}</arg_value>\n</tool_call>"
        ),
        calls=(("search", {"filters": {"a": [1, None]}}),),
        differs="the peer keeps a value that is not JSON as a string",
    ),
    Example("spaces", "<tool_call> now </tool_call>", calls=(NOW,)),
    Example("two on a line", write_dense(Case("", (PARIS, ADD))), calls=(PARIS, ADD)),
    Example(
        "cut off in a string",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
        open_call=("get_weather", '{"city": "Par'),
    ),
    Example(
        "the end is missing or was a stop string",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n",
        open_call=("get_weather", '{"city": "Paris"}'),
    ),
    Example(
        "the end is missing before the next call",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<tool_call>now\n</tool_call>",
        calls=(PARIS, NOW),
        differs="the peer reads both as one call",
    ),
    Example(
        "one tag of a value is missing",
        "<tool_call>get_weather<arg_key>city</arg_key>Paris</arg_value></tool_call>",
        calls=(PARIS,),
        differs="the peer drops the value",
    ),
    Example("an empty element", "A <tool_call></tool_call>b.", content="A b."),
    Example(
        "cut off in the name",
        "<tool_call>get_wea",
        content="<tool_call>get_wea",
        differs="the peer drops it",
    ),
    Example(
        "no call",
        "A <tool_call> is written in tags.",
        content="A <tool_call> is written in tags.",
        differs="the peer drops what follows a tag that begins no call",
    ),
]

OFF = {"enable_thinking": False}
REASONING = [
    *with_reasoning(
        rendered(write)[:30], lambda thought, text: f"\n<think>{thought}</think>\n{text}"
    ),
    *with_reasoning(rendered(write_dense)[15:45], lambda thought, text: f"{thought}</think>{text}"),
    Example("empty", "<think></think>\nHello.", content="Hello."),
    Example("off", "Hello.", content="Hello.", template_kwargs=OFF),
    Example(
        "off, tags",
        "<think>Hm.</think>Hi</think>",
        content="<think>Hm.</think>Hi</think>",
        template_kwargs=OFF,
    ),
    Example(
        "off, closed in the prompt",
        "Hello.",
        content="Hello.",
        template_kwargs=OFF,
        prompt_end="\n<think></think>",
    ),
    Example(
        "opened in the prompt",
        "Hm.</think>Hello.",
        content="Hello.",
        reasoning="Hm.",
        prompt_end="<|assistant|><think>",
    ),
    Example("no end", "<think>Hm.", reasoning="Hm."),
    Example(
        "a call ends it",
        "<think>Hm.\n" + write(Case("", (PARIS,))),
        content=write(Case("", (PARIS,))),
        reasoning="Hm.",
    ),
]
TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
CONTROL = {("tool_parser", "glm45"): TAGS, ("tool_parser", "glm47"): TAGS}
EXAMPLES = {
    ("tool_parser", "glm45"): [*rendered(write), *QUIRKS],
    ("tool_parser", "glm47"): [*rendered(write_dense), *QUIRKS],
    ("reasoning_parser", "glm45"): REASONING,
    ("reasoning_parser", "glm47"): REASONING,
}

PLAIN_IS_REASONING = {"glm45", "glm47"}
