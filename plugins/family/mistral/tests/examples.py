"""Outputs in the formats of Mistral and what they mean."""

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

TOKENS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def write(case: Case) -> str:
    calls = [f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}" for name, arguments in case.calls]
    return case.before + case.between.join(calls) + case.after


def write_list(case: Case) -> str:
    calls = ", ".join(
        dumped({"name": name, "arguments": arguments}) for name, arguments in case.calls
    )
    return case.before + (f"[TOOL_CALLS][{calls}]" if calls else "") + case.after


THOUGHTS = ("Let me think.\nYes, 1 < 2.", '北京 {"a": 1}')
CALL = write(Case("", (PARIS,)))
LIST_CALL = write_list(Case("", (PARIS, ADD)))

EXAMPLES = {
    ("tool_parser", "mistral"): [
        *rendered(write, differs=drops_text()),
        Example(
            "list",
            LIST_CALL,
            calls=(PARIS, ADD),
            differs="the peer knows this format only through mistral-common",
        ),
        Example(
            "list after text",
            "Looking. " + LIST_CALL,
            content="Looking. ",
            calls=(PARIS, ADD),
            differs="the peer knows this format only through mistral-common",
        ),
        Example(
            "list after a space",
            LIST_CALL.replace("][", "] ["),
            calls=(PARIS, ADD),
            differs="the peer knows this format only through mistral-common",
        ),
        Example(
            "nested list",
            write_list(Case("", (("search", {"filters": {"a": [1, {}]}}),))),
            calls=(("search", {"filters": {"a": [1, {}]}}),),
            differs="the peer knows this format only through mistral-common",
        ),
        Example(
            "ids",
            "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]now[CALL_ID]a1B2c3D4f[ARGS]{}",
            calls=(NOW, NOW),
            differs="the peer takes the id as part of the name",
        ),
        Example(
            "no token before the arguments",
            '[TOOL_CALLS]add{"a": 2, "b": 40}[TOOL_CALLS]now{}',
            calls=(ADD, NOW),
        ),
        Example(
            "cut off",
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Par',
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example(
            "cut off before the arguments",
            "[TOOL_CALLS]get_wea",
            content="[TOOL_CALLS]get_wea",
            differs="the peer reads it as a call",
        ),
        Example(
            "no call",
            "The token [TOOL_CALLS] begins calls.",
            content="The token [TOOL_CALLS] begins calls.",
            differs="the peer reads everything after the token as a call",
        ),
    ],
    ("reasoning_parser", "mistral"): [
        *with_reasoning(
            rendered(write)[:32], lambda thought, text: f"[THINK]{thought}[/THINK]{text}", THOUGHTS
        ),
        Example("empty", "[THINK][/THINK]Hello.", content="Hello."),
        Example("none", "Hello.", content="Hello."),
        Example(
            "text before it",
            "Before\n[THINK]Hm.[/THINK]\nThe rest",
            content="Before\n\nThe rest",
            reasoning="Hm.",
        ),
        Example("an end without a start", "Hm.[/THINK]The rest", content="Hm.The rest"),
        Example(
            "the end twice", "[THINK]Hm.[/THINK][/THINK]Hello.", content="Hello.", reasoning="Hm."
        ),
        Example(
            "as Magistral-2506 writes it",
            "<think>Hm.</think>Hello.",
            content="Hello.",
            reasoning="Hm.",
            differs="unknown",
        ),
        Example("no end", "[THINK]Hm.", reasoning="Hm."),
        Example("only the end", "[THINK]Hm.[/THINK]", reasoning="Hm."),
        Example("a call ends it", f"[THINK]Hm.{CALL}", content=CALL, reasoning="Hm."),
    ],
}
