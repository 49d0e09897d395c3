"""Example outputs for the contract tests of output parsers, and for the comparison with other
implementations.

`CASES` contains what models say, without a format: text and calls. A parser's examples are these
cases in its format, written by a function of a few lines (see `rendered`), and others that only its
format has. They are in `tests/examples.py` of its package, and pytest runs the contract tests on
them (`contract_output_parser`):

    EXAMPLES = {("tool_parser", "hermes"): [*rendered(write), Example("name", text, content=…,
    calls=…)]}

PLAIN_IS_REASONING, which is optional, names the reasoning parsers for which text without markers is
reasoning. TOKENS: see `load_tokens`. CONTROL (optional): parser → the control texts of its format,
if they are not its TOKENS. BETWEEN (optional): the text between two outputs that follow one
another, instead of a line break.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

DEFAULT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
Call = tuple[str, dict[str, Any]]
"""The name and the arguments of a call."""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's form. Each property is a JSON schema, or a word that stands for
    {"type": word}."""
    schemas = {
        key: {"type": value} if isinstance(value, str) else value
        for key, value in properties.items()
    }
    parameters = {"type": "object", "properties": schemas}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Tool {name}.", "parameters": parameters},
    }


TOOLS = (
    tool("get_weather", city="string", unit="string"),
    tool("add", a="integer", b="integer"),
    tool("measure", value="number", label="string"),
    tool("now"),
    tool("set_flag", flag="boolean", note={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    tool(
        "search",
        query="string",
        limit="integer",
        filters="object",
        tags={"type": "array", "items": {"type": "string"}},
    ),
    tool("write_file", path="string", text="string"),
    tool(
        "create_event",
        title="string",
        when="object",
        people={"type": "array", "items": {"type": "object"}},
    ),
)


@dataclass(frozen=True)
class Case:
    """What a model says, without a format: text, calls with text between them, text."""

    name: str
    calls: tuple[Call, ...] = ()
    before: str = ""
    between: str = ""
    after: str = ""

    @property
    def content(self) -> str:
        return self.before + self.between * max(len(self.calls) - 1, 0) + self.after


@dataclass(frozen=True)
class Example:
    """An output in some format, and what it means. calls: their arguments are JSON values; those of
    `open_call` are text that is cut off. differs: why the implementation for comparison reads it
    differently ("" = it must not)."""

    name: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    open_call: tuple[str, str] | None = None
    tools: tuple[Mapping[str, Any], ...] = field(default=TOOLS, repr=False)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_end: str = ""
    differs: str = ""


PARIS: Call = ("get_weather", {"city": "Paris"})
BERLIN: Call = ("get_weather", {"city": "Berlin", "unit": "celsius"})
ADD: Call = ("add", {"a": 2, "b": 40})
NOW: Call = ("now", {})
EVENT: Call = (
    "create_event",
    {
        "title": "Review",
        "when": {"day": "2025-05-01", "hours": [9, 10.5], "zone": {"name": "UTC", "offset": 0}},
        "people": [{"name": "Ann", "is_host": True}, {"name": "Bo", "is_host": False, "tags": []}],
    },
)
FIND: Call = (
    "search",
    {"query": "llm serving", "limit": 5, "filters": {"year": {"from": 2020}}, "tags": ["a", "b"]},
)

TEXTS = {
    "empty": "",
    "accents": "Zürich, São Paulo, Kraków",
    "chinese": "北京的天气怎么样？",
    "emoji": "👩‍🚀 to the 🌍!",
    "right to left": "مرحبا بالعالم",
    "double quotes": 'He said "no" twice.',
    "single quotes": "It's Bob's",
    "backslashes": "C:\\temp\\new\\x41",
    "lines": "first\nsecond\n\nfourth",
    "tabs": "a\tb\tc",
    "braces": "if (x) { y = {1: [2]}; }",
    "unbalanced": "}}]] {{[[ ( '",
    "json": '{"name": "f", "arguments": {"x": [1, 2]}}',
    "tags": "<b>bold</b> & <i>it</i> a<b c>d",
    "code": 'def f(x="1"):\n    return {"k": [x, \'y\']}  # done\n',
    "digits": "007",
    "word true": "true",
    "word null": "null",
    "math": "a = b; c != d, e <= f",
    "spaces inside": "a  b   c",
    "long": "The quick brown fox jumps over the lazy dog. " * 12 + "End.",
    "percent": "100% of $5 \\u00e9 #tag @home",
}


def _cases() -> list[Case]:
    single = {
        "one string": PARIS,
        "two strings": BERLIN,
        "integers": ADD,
        "no arguments": NOW,
        "nested": EVENT,
        "all kinds": FIND,
    }
    values: dict[str, Call] = {
        "negative integers": ("add", {"a": -1, "b": 0}),
        "large integers": ("add", {"a": 123456789012345678, "b": 1}),
        "fraction": ("measure", {"value": 3.25, "label": "pi?"}),
        "negative fraction": ("measure", {"value": -0.5}),
        "true": ("set_flag", {"flag": True}),
        "false and null": ("set_flag", {"flag": False, "note": None}),
        "empty list and object": ("search", {"query": "x", "filters": {}, "tags": []}),
        "strings in lists": (
            "search",
            {"query": "q", "tags": ["a b", "c,d", "é", 'say "hi"', "x=y"]},
        ),
        "deep": (
            "create_event",
            {"title": "t", "when": {"a": {"b": {"c": {"d": [[[1]], {"e": None}]}}}}},
        ),
    }
    cases = [Case(name, (call,)) for name, call in {**single, **values}.items()]
    cases += [
        Case(f"text: {name}", (("write_file", {"path": "a.txt", "text": text}),))
        for name, text in TEXTS.items()
    ]
    cases += [
        Case("two calls", (PARIS, BERLIN)),
        Case("the same call twice", (PARIS, PARIS)),
        Case("three kinds", (PARIS, ADD, NOW)),
        Case("no arguments first", (NOW, PARIS)),
        Case("no arguments twice", (NOW, NOW)),
        Case("nested twice", (EVENT, FIND)),
        Case("eight calls", tuple(("add", {"a": i, "b": i * i}) for i in range(8))),
        Case("no calls", before="The answer is 42."),
        Case("no calls, lines", before="One.\n\n- two\n- three\n"),
        Case("no calls, json", before='{"a": [1, 2, {"b": "c"}]} is JSON.'),
        Case("no calls, python", before="Use [x for x in y] or f(1)."),
        Case("no calls, tags", before="In HTML, <b>bold</b> and a < b; also </i>."),
        Case("no calls, unicode", before="你好 👋 – ça va?"),
        Case("text before", (PARIS,), before="Let me look. "),
        Case("line before", (BERLIN,), before="I will check the weather.\n"),
        Case("lines before", (ADD,), before="First line.\n\nSecond: 1 < 2.\n\n"),
        Case("unicode before", (PARIS,), before="Natürlich! 🌦️ "),
        Case("text before two calls", (PARIS, ADD), before="Two things. "),
        Case("quotes before", (PARIS,), before='The tool "get_weather" isn\'t {bad}: '),
        Case("text before no arguments", (NOW,), before="What time is it? "),
        Case("text before nested", (EVENT,), before="Creating it now.\n"),
        Case("text after", (PARIS,), after=" That is all."),
        Case("lines after", (ADD,), after="\n\nI will wait.\nReally."),
        Case("text before and after", (FIND,), before="Searching: ", after=" Done."),
        Case("text between", (PARIS, ADD), between=" and then "),
        Case("text everywhere", (PARIS, NOW, ADD), before="A. ", between=" next: ", after=" Z."),
    ]
    return cases


CASES = tuple(_cases())


def rendered(
    write: Callable[[Case], str],
    *,
    is_parallel: bool = True,
    has_before: bool = True,
    has_between: bool = True,
    has_after: bool = True,
    differs: Callable[[Case], str] = lambda case: "",
) -> list[Example]:
    """Return the cases in the format of `write`, without those that the format, or the peer's
    reading of it, excludes. White space around calls is not expected in the result, because a
    parser may drop it."""
    return [
        Example(
            case.name, write(case), content=case.content, calls=case.calls, differs=differs(case)
        )
        for case in CASES
        if (is_parallel or len(case.calls) < 2)
        and (has_before or not case.calls or not case.before)
        and (has_between or not case.between)
        and (has_after or not case.after)
    ]


def drops_text(*, between: bool = True, after: bool = True) -> Callable[[Case], str]:
    """For `rendered(differs=…)`: the peer drops text between or after calls, and Pegboard returns
    it as content."""

    def differs(case: Case) -> str:
        is_dropped = case.calls and ((between and case.between) or (after and case.after))
        return "the peer drops text after a call" if is_dropped else ""

    return differs


def with_reasoning(
    examples: Sequence[Example],
    write: Callable[[str, str], str],
    thoughts: Sequence[str] = ("Let me think.\nYes, 1 < 2.",),
) -> list[Example]:
    """Return the examples' texts as content after reasoning, as `write(thought, text)` writes them.
    Reasoning parsers do not read calls."""
    return [
        Example(
            f"{example.name}, thought {number}",
            write(thought, example.text),
            content=example.text,
            reasoning=thought,
        )
        for number, thought in enumerate(thoughts)
        for example in examples
    ]


def load_examples(path: Path) -> dict[tuple[str, str], list[Example]]:
    """Return EXAMPLES of a package's `tests/examples.py`. Tests are not packages, so the file is
    loaded by its path."""
    examples: dict[tuple[str, str], list[Example]] = _load(path).EXAMPLES
    return examples


def load_tokens(path: Path) -> tuple[str, ...]:
    """Return TOKENS of an `examples.py`: texts that are single tokens for the models of the format.
    There is a default."""
    tokens: tuple[str, ...] = getattr(_load(path), "TOKENS", DEFAULT_TOKENS)
    return tokens


def tokens_of(module: ModuleType, kind: str, name: str) -> tuple[str, ...]:
    """Return the control texts of a parser: those of the reasoning for a reasoning parser, the
    others for a tool parser."""
    control: Mapping[tuple[str, str], tuple[str, ...]] = getattr(module, "CONTROL", {})
    if (kind, name) in control:
        return control[kind, name]
    tokens: tuple[str, ...] = getattr(module, "TOKENS", DEFAULT_TOKENS)
    return tuple(
        token for token in tokens if ("think" in token.lower()) == (kind == "reasoning_parser")
    )


@cache
def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "examples_of_" + "_".join(path.parts[-4:-2]), path
    )
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
