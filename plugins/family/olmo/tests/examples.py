"""Outputs in the formats of Olmo 3 and what they mean."""

from __future__ import annotations

from pegboard_testing.parser_examples import (
    ADD,
    NOW,
    PARIS,
    Case,
    Example,
    rendered,
    with_reasoning,
)

TOKENS = ("</", "Ġ</", "think", ">")


def calls_of(case: Case) -> list[str]:
    return [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in case.calls
    ]


def write(case: Case) -> str:
    lines = "\n".join(calls_of(case))
    return (
        case.before
        + (f"<function_calls>\n{lines}\n</function_calls>" if lines else "")
        + case.after
    )


def around(case: Case) -> str:
    return "the peer drops text around the tags" if case.calls and case.content else ""


CONTROL = {("tool_parser", "olmo3"): ("<function_calls>", "</function_calls>")}
EXAMPLES = {
    ("tool_parser", "olmo3"): [
        *rendered(write, has_between=False, differs=around),
        Example("on one line", "<function_calls>add(a=2, b=40)</function_calls>", calls=(ADD,)),
        Example(
            "with empty lines",
            "<function_calls>\n\nnow()\n\nadd(a=2, b=40)\n\n</function_calls>\n",
            calls=(NOW, ADD),
        ),
        Example(
            "double quotes",
            '<function_calls>\nget_weather(city="Paris")\n</function_calls>',
            calls=(PARIS,),
        ),
        Example(
            "words of JSON",
            "<function_calls>\nset_flag(flag=true, note=null)\n</function_calls>",
            calls=(("set_flag", {"flag": True, "note": None}),),
        ),
        Example(
            "two sections",
            (
                "<function_calls>\nnow()\n</function_calls>\n<function_calls>\nadd(a=2, "
                "b=40)\n</function_calls>"
            ),
            calls=(NOW, ADD),
            differs="the peer reads only one section",
        ),
        Example(
            "no end tag",
            "<function_calls>\nnow()",
            calls=(NOW,),
        ),
        Example(
            "cut off",
            "<function_calls>\nget_weather(city='Par",
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example(
            "no call",
            "Put it into <function_calls>, please.",
            content="Put it into <function_calls>, please.",
        ),
        Example(
            "without the tags",
            "add(a=2, b=40)",
            content="add(a=2, b=40)",
        ),
    ],
    ("reasoning_parser", "olmo3"): [
        *with_reasoning(
            rendered(write)[:32], lambda thought, text: f"<think>{thought}</think>{text}"
        ),
        *with_reasoning(
            rendered(write)[20:52], lambda thought, text: f"{thought}</think>\n\n{text}"
        ),
        Example(
            "opened in the prompt",
            "Hm.</think>Hello.",
            content="Hello.",
            reasoning="Hm.",
            prompt_end="assistant\n<think>",
        ),
        Example("no end", "<think>Hm.", reasoning="Hm."),
        Example("neither", "Hm.", reasoning="Hm."),
        Example("empty", "</think>Hello.", content="Hello."),
    ],
}

PLAIN_IS_REASONING = {"olmo3"}
