"""Outputs in the format of Seed-OSS and what they mean."""

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

TOKENS = ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>")


def plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write(case: Case) -> str:
    """Line breaks are written around a value only if the value itself has some."""
    calls = []
    for name, arguments in case.calls:
        parameters = []
        for key, value in arguments.items():
            line = "\n" if plain(value) != plain(value).strip("\n") else ""
            parameters.append(f"<parameter={key}>{line}{plain(value)}{line}</parameter>\n")
        calls.append(
            f"<seed:tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</seed:tool_call>"
        )
    return case.before + (case.between or "\n").join(calls) + case.after


def call(parameters: str, name: str = "get_weather") -> str:
    return f"<seed:tool_call>\n<function={name}>\n{parameters}\n</function>\n</seed:tool_call>"


THOUGHTS = ("Let me think.\nYes, 1 < 2.", '北京 {"a": 1}')
BUDGET = "<seed:cot_budget_reflect>I have used 10 tokens.</seed:cot_budget_reflect>"
CALL = write(Case("", (PARIS,)))

EXAMPLES = {
    ("tool_parser", "seed_oss"): [
        *rendered(write),
        Example(
            "lines around a value", call("<parameter=city>\nParis\n</parameter>"), calls=(PARIS,)
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
            "True for a boolean",
            call("<parameter=flag>True</parameter>", "set_flag"),
            calls=(("set_flag", {"flag": True}),),
        ),
        Example(
            "unknown tool",
            call("<parameter=x>1</parameter>", "other"),
            calls=(("other", {"x": "1"}),),
        ),
        Example(
            "a value without end",
            call("<parameter=a>2<parameter=b>40", "add"),
            calls=(ADD,),
            differs="the peer drops the last value when its end is missing",
        ),
        Example("an empty element", "Yes. <seed:tool_call>\n</seed:tool_call>", content="Yes."),
        Example(
            "a call that the reasoning quotes",
            f"<seed:think>I could write {CALL}, or not.</seed:think>{CALL}",
            content=f"<seed:think>I could write {CALL}, or not.</seed:think>",
            calls=(PARIS,),
            differs="the peer reads the call that is quoted, too",
        ),
        Example(
            "reasoning that the prompt opens",
            f"I could write {CALL}, or not.</seed:think>{CALL}",
            content=f"I could write {CALL}, or not.</seed:think>",
            calls=(PARIS,),
            prompt_end="<seed:think>",
            differs="the peer does not see the prompt",
        ),
        Example("no end tag", CALL.removesuffix("\n</seed:tool_call>"), calls=(PARIS,)),
        Example("no seed tag", "<function=now>\n</function>", calls=(NOW,)),
        Example(
            "cut off in a string",
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Par",
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example(
            "no call",
            "The tag <seed:tool_call> begins calls.",
            content="The tag <seed:tool_call> begins calls.",
            differs="the peer drops what follows a tag that begins no call",
        ),
    ],
    ("reasoning_parser", "seed_oss"): [
        *with_reasoning(
            rendered(write)[:30],
            lambda thought, text: f"<seed:think>{thought}</seed:think>\n{text}",
            THOUGHTS,
        ),
        *with_reasoning(
            rendered(write)[30:36], lambda thought, text: f"{thought}</seed:think>\n{text}"
        ),
        Example("empty", "<seed:think></seed:think>\nHello.", content="Hello."),
        Example(
            "budget",
            f"<seed:think>\n{BUDGET}\nHm.\n</seed:think>Hello.",
            content="Hello.",
            reasoning=f"{BUDGET}\nHm.",
        ),
        Example(
            "opened in the prompt",
            "Hm.</seed:think>Hi.",
            content="Hi.",
            reasoning="Hm.",
            prompt_end="<seed:think>\n",
        ),
        Example(
            "closed in the prompt",
            "Hello.",
            content="Hello.",
            prompt_end="<seed:think>\n</seed:think>",
        ),
        Example("no end", "<seed:think>Hm.", reasoning="Hm."),
        Example("only the end", "Hm.</seed:think>", reasoning="Hm."),
        Example("a call ends it", f"<seed:think>Hm.\n{CALL}", content=CALL, reasoning="Hm."),
    ],
}

PLAIN_IS_REASONING = {"seed_oss"}
