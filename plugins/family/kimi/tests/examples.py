"""Outputs in the format of Kimi K2 and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import (
    ADD,
    NOW,
    PARIS,
    TOOLS,
    Case,
    Example,
    drops_text,
    rendered,
    tool,
    with_reasoning,
)

SECTION = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>"
CALL_END = "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
TOKENS = (SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS, "<think>", "</think>")


def one(id: str, arguments: str) -> str:
    return f"{CALL}{id}{ARGUMENTS}{arguments}{CALL_END}"


def write(case: Case) -> str:
    calls = [
        one(f"functions.{name}:{index}", json.dumps(arguments, ensure_ascii=False))
        for index, (name, arguments) in enumerate(case.calls)
    ]
    return (
        case.before
        + (SECTION + case.between.join(calls) + SECTION_END if calls else "")
        + case.after
    )


CITY = '{"city": "Paris"}'
NO_NAME = "the peer takes the number as the name, or drops the call"
# a section end alone is text
CONTROL = {("tool_parser", "kimi_k2"): (SECTION, CALL, CALL_END, ARGUMENTS)}
EXAMPLES = {
    ("tool_parser", "kimi_k2"): [
        *rendered(write, differs=drops_text()),
        Example("no prefix", SECTION + one("get_weather:3", CITY) + SECTION_END, calls=(PARIS,)),
        Example(
            "lines",
            f"{SECTION}\n{CALL}functions.now:0\n{ARGUMENTS}\n{{}}\n{CALL_END}\n{SECTION_END}",
            calls=(NOW,),
        ),
        Example("no arguments", SECTION + one("functions.now:0", "") + SECTION_END, calls=(NOW,)),
        Example(
            "the same id twice",
            SECTION + one("functions.now:0", "{}") * 2 + SECTION_END,
            calls=(NOW, NOW),
        ),
        Example("an empty section", f"Yes. {SECTION}{SECTION_END}", content="Yes."),
        Example(
            "no end of the call",
            f"{SECTION}{CALL}functions.get_weather:0{ARGUMENTS}{CITY}{SECTION_END}",
            calls=(PARIS,),
        ),
        Example(
            "an end inside the JSON, then a good call",
            f'{SECTION}{CALL}functions.get_weather:0{ARGUMENTS}{{"city": "Paris"{CALL_END}'
            + one("functions.now:1", "{}")
            + SECTION_END,
            calls=(PARIS, NOW),
            differs="the peer returns arguments that are not JSON",
        ),
        Example(
            "an end inside a string",
            (
                f'{SECTION}{CALL}functions.get_weather:0{ARGUMENTS}{{"city": '
                f'"Paris{CALL_END}{SECTION_END}'
            ),
            calls=(PARIS,),
            differs="the peer returns arguments that are not JSON",
        ),
        Example(
            "no section",
            one("functions.get_weather:0", CITY),
            calls=(PARIS,),
            differs="the peer needs the section",
        ),
        Example("a lone section end", f"Yes. {SECTION_END} No.", content=f"Yes. {SECTION_END} No."),
        Example(
            "text before the section end",
            SECTION + one("functions.now:0", "{}") + "Done." + SECTION_END,
            content="Done.",
            calls=(NOW,),
            differs="the peer drops text after a call",
        ),
        Example(
            "no section end", SECTION + one("functions.add:0", '{"a": 2, "b": 40}'), calls=(ADD,)
        ),
        Example(
            "a number as id",
            SECTION + one("0", CITY) + SECTION_END,
            calls=(PARIS,),
            tools=(TOOLS[0],),
            differs=NO_NAME,
        ),
        Example(
            "a number and no arguments",
            SECTION + one("0", "") + SECTION_END,
            calls=(NOW,),
            tools=(TOOLS[3],),
            differs=NO_NAME,
        ),
        Example(
            "the only tool with these arguments",
            f"{SECTION}{one('0', CITY)}{one('1', '{}')}",
            calls=(PARIS,),
            content=one("1", "{}"),
            differs=NO_NAME,
        ),
        Example(
            "two tools with these arguments",
            SECTION + one("0", CITY) + SECTION_END,
            content=SECTION + one("0", CITY) + SECTION_END,
            tools=(TOOLS[0], tool("book_flight", city="string")),
            differs=NO_NAME,
        ),
        Example(
            "a number and deep arguments",
            one("0", deep := '{"a":' * 9000 + "1" + "}" * 9000),
            content=one("0", deep),
        ),
        Example(
            "a number and broken arguments",
            one("0", '{"city": "Par'),
            content=one("0", '{"city": "Par'),
        ),
        Example(
            "cut off",
            f'{SECTION}{CALL}functions.get_weather:0{ARGUMENTS}{{"city": "Par',
            open_call=("get_weather", '{"city": "Par'),
        ),
        Example(
            "no number in the id",
            SECTION + one("functions.now", "{}") + SECTION_END,
            content=SECTION + one("functions.now", "{}") + SECTION_END,
            differs="the peer drops it",
        ),
        Example(
            "no call",
            f"{SECTION} begins calls.",
            content=f"{SECTION} begins calls.",
            differs="the peer drops it",
        ),
    ],
    ("reasoning_parser", "kimi_k2"): [
        *with_reasoning(
            rendered(write)[:30], lambda thought, text: f"<think>{thought}</think>{text}"
        ),
        *with_reasoning(
            rendered(write)[20:50], lambda thought, text: f"{thought} </think>\n{text}"
        ),
        Example("empty", "<think></think>Hello.", content="Hello."),
        Example("off", "Hello.", content="Hello.", template_kwargs={"thinking": False}),
        Example(
            "opened in the prompt",
            "Hm.</think>Hello.",
            content="Hello.",
            reasoning="Hm.",
            prompt_end="<think>",
        ),
        Example("no end", "<think>Hm.", reasoning="Hm."),
        Example(
            "a call ends it",
            "<think>Hm." + write(Case("", (PARIS,))),
            content=write(Case("", (PARIS,))),
            reasoning="Hm.",
        ),
    ],
}

PLAIN_IS_REASONING = {"kimi_k2"}
