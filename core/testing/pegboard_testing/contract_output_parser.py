"""Contract tests of the kinds `tool_parser` and `reasoning_parser`.

The pytest plugin collects them from every `tests/examples.py` that imports
`pegboard_testing.parser_examples`, one class per parser: authors write only the examples (see
there). The parsers are found as installed plugins.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pegboard.interfaces.output_parser import (
    Content,
    Event,
    OutputParser,
    OutputParserSetup,
    ToolCallStart,
)
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard.plugins.registry import Registry
from pegboard_chat.parsing import Message, fold, merged
from pegboard_testing.check_mode import check_order
from pegboard_testing.parser_examples import TOOLS, Example, tokens_of
from pegboard_testing.parser_mutations import (
    broken_arguments,
    loose_ends,
    mutated,
    token_mistakes,
)

VOCABULARY = Vocabulary((b"a", b"b"), frozenset(), ())
SENTINEL = "zq7x9"
FILLERS = ("a", " ", "\n", '"', "\\", "1", "<", "{", "a=1,", "é🚀")
LIGHT = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def setup_for(example: Example | None = None) -> OutputParserSetup:
    """Return the setup of a parser for an example or, without one, for any text."""
    if example is None:
        return OutputParserSetup(VOCABULARY, TOOLS)
    return OutputParserSetup(VOCABULARY, example.tools, example.template_kwargs, example.prompt_end)


def cut(text: str, places: Iterable[int]) -> list[str]:
    """Return the text cut into pieces. places: any numbers."""
    marks = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in zip(marks, marks[1:], strict=False)]


def tokens(text: str) -> list[str]:
    """Return pieces like those of a model's vocabulary: words with the space before them, single
    signs, up to four letters."""
    return re.findall(r" ?\w{1,4}|\s|[^\w\s]{1,2}", text)


def run(parser: OutputParser, pieces: Iterable[str]) -> list[Event]:
    """Return all events. Adjacent events that continue each other are joined."""
    events = [event for piece in pieces for event in parser.feed(piece, ())]
    return merged(events + parser.finish())


def said(message: Message) -> str:
    """Return all texts of a message as one string. If an id contains the name, the name is included
    once."""
    names = [
        call.id if call.name in call.id else f"{call.id} {call.name}" for call in message.tool_calls
    ]
    calls = [
        f"{name} {call.arguments}" for name, call in zip(names, message.tool_calls, strict=True)
    ]
    return "\n".join([message.content, message.reasoning, *calls])


def least_text(form: Mapping[str, Any]) -> str:
    """Return the shortest output of a structural tag's format: without optional parts, and with the
    first of several choices."""
    kind = form["type"]
    if kind == "tag":
        return f"{form['begin']}{least_text(form['content'])}{form['end']}"
    if kind == "sequence":
        return "".join(map(least_text, form["elements"]))
    if kind == "or":
        return least_text(form["elements"][0])
    if kind == "json_schema":
        return "{}"
    if kind == "plus":
        return least_text(form["content"])
    if kind == "regex":
        return next(text for text in ("", "0", "a" * 9) if re.fullmatch(form["pattern"], text))
    assert kind in ("const_string", "optional", "star", "any_text"), form
    return str(form.get("value", ""))


class OutputParserContract:
    """Every output parser passes these. make: builds a parser from its options (None) and a setup.
    plain_is_reasoning: text without any marker is reasoning, because the output begins inside the
    reasoning. tokens: the format's control texts. reads_calls: it is a tool parser. between: the
    text between two outputs that follow one another."""

    make: ClassVar[Callable[[None, OutputParserSetup], OutputParser]]
    examples: ClassVar[Sequence[Example]] = ()
    plain_is_reasoning: ClassVar[bool] = False
    tokens: ClassVar[Sequence[str]] = ()
    reads_calls: ClassVar[bool] = True
    between: ClassVar[str] = "\n"

    def parser(self, setup: OutputParserSetup) -> OutputParser:
        """Return a new parser."""
        return type(self).make(None, setup)

    def parse(self, example: Example, pieces: Iterable[str]) -> list[Event]:
        events = run(self.parser(setup_for(example)), pieces)
        check_order(events)
        return self.without_random_ids(events, example.text)

    def without_random_ids(self, events: Sequence[Event], text: str) -> list[Event]:
        """Return the events without ids that differ from run to run: those of `fresh_id`, and other
        ids that the parser makes up, which are not in the text."""
        one, other = (self.parser(setup_for()).call_id(0, "f") for _ in range(2))
        is_own = one != other

        def stable(event: Event) -> Event:
            if (
                isinstance(event, ToolCallStart)
                and event.id not in text
                and (is_own or event.id.startswith("chatcmpl-tool-"))
            ):
                return dataclasses.replace(event, id="")
            return event

        return [stable(event) for event in events]

    def test_examples_mean_what_they_say(self) -> None:
        assert self.examples, "set `examples`"
        for example in self.examples:
            message = fold(self.parse(example, [example.text]))
            closed = [
                (call.name, json.loads(call.arguments))
                for call in message.tool_calls
                if call.is_complete
            ]
            opened = [
                (call.name, call.arguments) for call in message.tool_calls if not call.is_complete
            ]
            assert closed == list(example.calls), (example, message)
            assert opened == ([example.open_call] if example.open_call else []), (example, message)
            assert message.reasoning.strip() == example.reasoning.strip(), (example, message)
            if example.calls:
                assert message.content.split() == example.content.split(), (example, message)
            else:
                assert message.content.strip() == example.content.strip(), (example, message)

    def test_every_chunking_gives_the_same_events(self) -> None:
        for example in self.examples:
            whole = self.parse(example, [example.text])
            rng = random.Random(example.text)
            assert self.parse(example, example.text) == whole, example
            assert self.parse(example, tokens(example.text)) == whole, example
            for _ in range(4):
                places = rng.choices(range(len(example.text) + 1), k=rng.randint(1, 12))
                assert self.parse(example, cut(example.text, places)) == whole, example
            assert (
                self.parse(example, ["", *cut(example.text, range(0, len(example.text), 3)), ""])
                == whole
            ), example

    @LIGHT
    @given(st.data())
    def test_broken_examples(self, data: st.DataObject) -> None:
        """If parts of the text are left out, doubled or exchanged, the parser never raises, gives
        the same events in every chunking, and does not split complete calls."""
        example = data.draw(st.sampled_from(list(self.examples)))
        other = data.draw(st.sampled_from(list(self.examples))).text
        a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(example.text))] * 2)))
        c, d = sorted(data.draw(st.tuples(*[st.integers(0, len(other))] * 2)))
        for text in (
            example.text[:a],
            example.text[:a] + example.text[b:],
            example.text[:b] + example.text[a:],
            example.text[:a] + other[c:d] + example.text[b:],
            example.text[a:] + other,
        ):
            broken = dataclasses.replace(example, text=text)
            whole = self.parse(broken, [text])
            assert self.parse(broken, text) == whole, text
            assert (
                self.parse(broken, cut(text, data.draw(st.lists(st.integers(0, 999), max_size=8))))
                == whole
            ), text

    @LIGHT
    @given(st.data())
    def test_mistakes_of_models(self, data: st.DataObject) -> None:
        """The rule of `parser_mutations`, for examples with one mistake, alone and before an output
        without a mistake."""
        example = data.draw(st.sampled_from(list(self.examples)))
        rng = data.draw(st.randoms(use_true_random=False))
        self.check_mistake(example, mutated(example.text, self.tokens, rng), rng)

    def test_every_mistake_with_a_token(self) -> None:
        for example in self.examples:
            for number, text in enumerate(token_mistakes(example.text, self.tokens)):
                self.check_mistake(example, text, random.Random(number))

    def check_mistake(self, example: Example, text: str, rng: random.Random) -> None:
        """Check what the parser makes of `text`, an example's with a mistake."""
        broken = dataclasses.replace(example, text=text)
        events = self.parse(broken, [text])
        assert self.parse(broken, cut(text, rng.choices(range(len(text) + 1), k=6))) == events, text
        message = fold(events)
        content = message.content
        thoughts = getattr(self.parser(setup_for()), "thoughts", {}).items()
        for start, end in thoughts:  # may quote anything
            if example.prompt_end.rstrip().endswith(start):
                content = start + content
            content = re.sub(
                f"{re.escape(start)}.*?({re.escape(end)}|$)", "", content, flags=re.DOTALL
            )
        is_off = not self.parser(setup_for(broken)).reasoning_end()
        leaves_reasoning = not self.reads_calls and (
            is_off or not any(each.reasoning for each in self.examples)
        )
        if leaves_reasoning:  # the markers stay in the content on purpose
            return
        assert not loose_ends(content, self.tokens), (text, message)
        if not self.reads_calls:
            return
        assert not broken_arguments(message, bool(events) and isinstance(events[-1], Content)), (
            text,
            message,
        )
        prompt = example.prompt_end + text
        if any(prompt.rfind(start) > prompt.rfind(end) for start, end in thoughts):
            return  # a thought without an end takes all that follows
        whole = self.whole_outputs()
        if not whole or example.tools is not TOOLS:
            return
        good = rng.choice(whole)
        after = f"{text}{self.between}{good.text}"
        last = self.arguments_of(dataclasses.replace(example, text=after))[-len(good.calls) :]
        assert last == self.arguments_of(good), (after, last)

    @LIGHT
    @given(st.data())
    def test_calls_in_the_reasoning_are_not_calls(self, data: st.DataObject) -> None:
        """If no reasoning parser removes the reasoning, its text is content, also where it quotes
        calls."""
        thoughts = getattr(self.parser(setup_for()), "thoughts", {})
        whole = self.whole_outputs()
        if not (self.reads_calls and thoughts and whole):
            return
        quoted, good = (data.draw(st.sampled_from(whole)) for _ in range(2))
        start, end = data.draw(st.sampled_from(sorted(thoughts.items())))
        thought = f"Maybe {quoted.text}? Or not."
        for prompt_end, text in (
            ("", f"{start}{thought}{end}\n{good.text}"),
            (start, f"{thought}{end}\n{good.text}"),
        ):
            message = fold(
                self.parse(dataclasses.replace(good, text=text, prompt_end=prompt_end), text)
            )
            assert [
                (call.name, call.arguments) for call in message.tool_calls
            ] == self.arguments_of(good), (text, message)
            assert thought in message.content, message

    def whole_outputs(self) -> list[Example]:
        """Return the examples with complete calls that begin with a control token."""
        return [
            example
            for example in self.examples
            if example.calls
            and not example.open_call
            and example.text.startswith(tuple(self.tokens))
            and example.tools is TOOLS
        ]

    def arguments_of(self, example: Example) -> list[tuple[str, str]]:
        calls = fold(self.parse(example, [example.text])).tool_calls
        return [(call.name, call.arguments) for call in calls]

    @LIGHT
    @given(st.data())
    def test_any_text(self, data: st.DataObject) -> None:
        signs = sorted(
            {
                sign
                for example in self.examples
                for sign in re.findall(r"[^\w\s]+|\w+|\s", example.text[:600])
            }
        )
        parts = st.sampled_from(signs) | st.text(max_size=5)
        text = data.draw(st.lists(parts, max_size=40).map("".join))
        example = Example("any", text)
        whole = self.parse(example, [text])
        assert self.parse(example, text) == whole, text
        assert (
            self.parse(example, cut(text, data.draw(st.lists(st.integers(0, 999), max_size=8))))
            == whole
        ), text

    @LIGHT
    @given(st.data())
    def test_nothing_is_lost_or_doubled(self, data: st.DataObject) -> None:
        """A word inserted anywhere into an example appears exactly once in the message, even if it
        breaks the format."""
        example = data.draw(st.sampled_from(list(self.examples)))
        place = data.draw(st.integers(0, len(example.text)))
        text = example.text[:place] + SENTINEL + example.text[place:]
        for pieces in ([text], tokens(text)):
            message = fold(self.parse(dataclasses.replace(example, text=text), pieces))
            assert said(message).count(SENTINEL) == 1, (text, message)

    @LIGHT
    @given(st.text(st.sampled_from("abc DEF\nå🚀.,:;"), min_size=1))
    def test_plain_text_stays_as_it_is(self, text: str) -> None:
        message = fold(self.parse(Example("plain", text), text))
        assert not message.tool_calls
        assert (message.reasoning if self.plain_is_reasoning else message.content) == text, message

    @LIGHT
    @given(st.data())
    def test_cut_off_examples(self, data: st.DataObject) -> None:
        """Calls that are complete at the start of an output are also the first calls of the whole
        output."""
        example = data.draw(st.sampled_from(list(self.examples)))
        text = example.text[: data.draw(st.integers(0, len(example.text)))]
        calls = fold(self.parse(dataclasses.replace(example, text=text), [text])).tool_calls
        complete = [(call.name, json.loads(call.arguments)) for call in calls if call.is_complete]
        assert complete == list(example.calls[: len(complete)]), (text, calls)
        assert len(calls) <= len(example.calls) + (example.open_call is not None), (text, calls)

    def test_long_output_in_time(self) -> None:
        """16,000 tokens with calls, fed one by one, take under a quarter of a second of CPU time
        and give the same result as all at once."""
        texts = [example.text for example in self.examples if len(example.text) < 4000]
        filling = [text for text in texts for _ in range(4)][:60]
        while len(pieces := tokens("\n".join(filling))) < 16000:
            filling += ["Some words, in between. " * 60, *filling[:10]]
        pieces = pieces[:16000]
        example = Example("long", "".join(pieces))
        text = "".join(pieces)
        best = min(self.seconds(pieces) for _ in range(2))
        assert best < 0.25, best
        assert self.parse(example, pieces) == self.parse(example, [text])

    @pytest.mark.parametrize("filler", FILLERS)
    def test_time_is_linear(self, filler: str) -> None:
        """For any text that is repeated after any beginning, eight times the text takes about eight
        times as long, not 64 times."""
        rng = random.Random(filler)
        longest = max(self.examples, key=lambda example: len(example.text))
        for text in (longest.text, rng.choice(self.examples).text):
            start = text[: rng.randint(0, len(text))]
            short, long = (
                [start, *[filler * (4 // len(filler) or 1)] * count] for count in (250, 2000)
            )
            times = [[self.seconds(pieces) for pieces in (short, long)] for _ in range(2)]
            (a, b) = (min(column) for column in zip(*times, strict=True))
            assert b < 0.03 or b < 8 * a * 3, (start, filler, a, b)

    def test_reasoning_end_is_text(self) -> None:
        for example in self.examples[:5]:
            ends = self.parser(setup_for(example)).reasoning_end()
            assert isinstance(ends, tuple) and all(isinstance(end, str) and end for end in ends)

    def test_ids_of_forced_calls_differ(self) -> None:
        parser = self.parser(setup_for())
        ids = [parser.call_id(index, "f") for index in range(3)]
        assert all(ids) and len(set(ids)) == 3

    def test_constraint_describes_calls_that_are_read(self) -> None:
        """Everything that a structural tag allows for a tool is parsed as a call of that tool."""
        constraint = self.parser(setup_for()).constraint(TOOLS, "auto")
        if constraint is None or constraint.kind != "structural_tag":
            return
        tag = json.loads(constraint.text)
        if "structures" not in tag:
            return self.least_texts_are_read(tag["format"])
        for tool, structure in zip(TOOLS, tag["structures"], strict=True):
            assert any(structure["begin"].startswith(trigger) for trigger in tag["triggers"])
            text = structure["begin"] + '{"x": 1}' + structure["end"]
            message = fold(self.parse(Example("constrained", text), [text]))
            assert [
                (call.name, call.arguments, call.is_complete) for call in message.tool_calls
            ] == [(tool["function"]["name"], '{"x": 1}', True)]
            assert not message.content

    def least_texts_are_read(self, form: Mapping[str, Any]) -> None:
        names = {tool["function"]["name"] for tool in TOOLS}
        tags = form.get("tags", [form])
        assert all(
            tag["begin"].startswith(tuple(form["triggers"])) for tag in tags if "begin" in tag
        )
        read = set()
        for text in map(least_text, tags):
            message = fold(self.parse(Example("constrained", text), [text]))
            assert [(call.arguments, call.is_complete) for call in message.tool_calls] == [
                ("{}", True)
            ], text
            assert not message.content.strip()
            read.add(message.tool_calls[0].name)
        assert read <= names

    def seconds(self, pieces: Sequence[str]) -> float:
        """Return the CPU time of one pass in seconds."""
        parser = self.parser(setup_for())
        started = time.process_time()
        for piece in pieces:
            parser.feed(piece, ())
        parser.finish()
        return time.process_time() - started


def contract_classes(module: ModuleType) -> dict[str, type[OutputParserContract]]:
    """Return a test class for each parser in an `examples.py`. Two names of one parser with the
    same examples share a class."""
    registry = Registry.discover()
    classes: dict[tuple[Any, int], type[OutputParserContract]] = {}
    for (kind, name), examples in module.EXAMPLES.items():
        make = registry.load(registry.find(kind, name))
        fields = {
            "make": staticmethod(make),
            "examples": examples,
            "tokens": tokens_of(module, kind, name),
            "reads_calls": kind == "tool_parser",
            "between": getattr(module, "BETWEEN", "\n"),
            "plain_is_reasoning": kind == "reasoning_parser"
            and name in getattr(module, "PLAIN_IS_REASONING", ()),
        }
        title = f"Test_{kind}_{name.replace('-', '_').replace('.', '_')}"
        classes.setdefault((make, id(examples)), type(title, (OutputParserContract,), fields))
    return {contract.__name__: contract for contract in classes.values()}
