"""Outputs in the harmony format and what they mean."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import ADD, NOW, PARIS, Case, Example, rendered, tool

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
END = "<|end|>"
RETURN = "<|return|>"
CALL = "<|call|>"
TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
NEXT = f"{START}assistant"


def say(channel: str, text: str, end: str = END) -> str:
    return f"{CHANNEL}{channel}{MESSAGE}{text}{end}"


def call(name: str, arguments: str) -> str:
    return f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}{arguments}{CALL}"


def messages(case: Case) -> list[str]:
    """Preambles are on the channel commentary. The answer is on the channel final."""
    parts = [say("commentary" if case.calls else "final", case.before)] if case.before else []
    for number, (name, arguments) in enumerate(case.calls):
        if number and case.between:
            parts.append(say("commentary", case.between))
        parts.append(call(name, json.dumps(arguments, ensure_ascii=False)))
    return parts + ([say("final", case.after, RETURN)] if case.after else [])


def write(case: Case) -> str:
    return NEXT.join(messages(case))


PYTHON = (tool("python", code="string"), tool("now"))
DROPPED = "drops text without a header"
THOUGHT = "Let me think.\nYes, 1 < 2."
ANALYSIS = say("analysis", THOUGHT)
PARIS_CALL = call("get_weather", '{"city": "Paris"}')
TOOLS = [
    *rendered(write),
    Example("with reasoning", ANALYSIS + NEXT + PARIS_CALL, reasoning=THOUGHT, calls=(PARIS,)),
    Example(
        "recipient before the channel",
        (
            f'{ANALYSIS}{NEXT} to=functions.add{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}{{"a": '
            f'2, "b": 40}}{CALL}'
        ),
        reasoning=THOUGHT,
        calls=(ADD,),
    ),
    Example(
        "recipient first of all",
        f" to=functions.now{CHANNEL}commentary json{MESSAGE}{{}}{CALL}",
        calls=(NOW,),
    ),
    Example(
        "no constraint", f"{CHANNEL}commentary to=functions.now{MESSAGE}{{}}{CALL}", calls=(NOW,)
    ),
    Example("no end of the call", PARIS_CALL.removesuffix(CALL), calls=(PARIS,)),
    Example(
        "no end of the reasoning",
        f"{CHANNEL}analysis{MESSAGE}Hm.{NEXT}{PARIS_CALL}",
        reasoning="Hm.",
        calls=(PARIS,),
        differs="reads the next message as part of the text",
    ),
    Example(
        "a built-in tool",
        f'{CHANNEL}analysis to=browser.open code{MESSAGE}{{"id": 1}}{CALL}',
        calls=(("browser.open", {"id": 1}),),
    ),
    Example(
        "code as JSON",
        call("python", '{"code": "1"}'),
        calls=(("python", {"code": "1"}),),
        tools=PYTHON,
    ),
    Example("an empty body", call("now", ""), calls=(NOW,), differs="leaves the arguments empty"),
    Example(
        "a message to assistant",
        f"{CHANNEL}commentary to=assistant{MESSAGE}Hello.{CALL}",
        content="Hello.",
        differs="makes it a call",
    ),
    Example(
        "the end inside the JSON",
        f'{call("get_weather", "")[: -len(CALL)]}{{"city": "Paris"{CALL}',
        calls=(PARIS,),
        differs="returns arguments that are not JSON",
    ),
    Example(
        "preamble and answer",
        say("commentary", "Let me see.") + NEXT + say("final", "Done.", RETURN),
        content="Let me see.\nDone.",
        differs="joins them without a line break",
    ),
    Example(
        "tokens in a text",
        say("final", f"a{MESSAGE}b{CONSTRAIN}c", RETURN),
        content="abc",
        differs="keeps them",
    ),
    Example(
        "cut off", PARIS_CALL[: -len('is"}' + CALL)], open_call=("get_weather", '{"city": "Par')
    ),
    Example(
        "cut off in the header",
        f"{CHANNEL}commentary to=func",
        content="commentary to=func",
        differs=DROPPED,
    ),
    Example("no harmony", "Just text.", content="Just text.", differs=DROPPED),
]


def apart(case: Case) -> Example:
    """For the reasoning parser. Calls stay as they are written."""
    text = NEXT.join([ANALYSIS, *messages(case)])
    content = ""
    for part in messages(case):
        content += (
            NEXT + part
            if part.endswith(CALL)
            else part.split(MESSAGE, 1)[1].removesuffix(END).removesuffix(RETURN)
        )
    return Example(case.name, text, content=content, reasoning=THOUGHT)


CASES = [
    Case(example.name, example.calls, example.content)
    for example in rendered(write)
    if example.content or example.calls
]

BETWEEN = NEXT
# calls stay as they are written, see test_openai.py
CONTROL = {("reasoning_parser", "openai_gptoss"): ()}
EXAMPLES = {
    ("tool_parser", "openai"): TOOLS,
    ("reasoning_parser", "openai_gptoss"): [
        *map(apart, CASES),
        Example("only an answer", say("final", "Hello.", RETURN), content="Hello."),
        Example("the stop token is not there", say("final", "Hello.", ""), content="Hello."),
        Example("no end", f"{CHANNEL}analysis{MESSAGE}Hm.", reasoning="Hm."),
        Example(
            "reasoning twice",
            f"{say('analysis', 'A. ')}{NEXT}{say('analysis', 'B.')}{NEXT}{say('final', 'C.', '')}",
            "C.",
            "A. B.",
        ),
    ],
}
