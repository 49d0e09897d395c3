"""Tool calls of FunctionGemma.

    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>

Format: https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices. Strings are written unchanged between two
<escape>; numbers, true, false, null, lists and objects (with bare keys) are written as in JSON. Other bare words are typed by the
schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.output_parser import Content
from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import Markers, Notation, Steps, StreamParser, coerce, constrained_objects, parameter_types

START, END = "<start_function_call>", "<end_function_call>"
ESCAPE = "<escape>"
STARTS, ESCAPES = Markers(START), Markers(ESCAPE)
KEY = re.compile(r"[^:{}\[\],<>]*")
BARE = re.compile(r"[^{}\[\],<>]*")
CLOSERS = {"{": "}", "[": "]"}
NOTATION = Notation.between(ESCAPE, key=re.compile(r"[^:{}\[\],<>\s](?:[^:{}\[\],<>]*[^:{}\[\],<>\s])?"))


class FunctionGemmaToolParser(StreamParser):
    def read(self) -> Steps[None]:
        while (yield from self.prose(STARTS)):
            yield from self.attempt(self._call())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return constrained_objects(tools, NOTATION, START, "call:", END) if choice == "auto" else None

    def _call(self) -> Steps[bool]:
        yield from self.text.space()
        if not (yield from self.text.accept("call:")):
            return False
        yield from self.text.space()
        name = yield from self.text.word()
        yield from self.text.space()
        if not name or (yield from self.text.peek()) != "{":
            return False
        self.text.forget()
        yield self.calls.start(name)
        if not (yield from self._value(frozenset({"object"}), name)):
            return False
        yield self.calls.end()
        yield from self.text.closing(END)
        return True

    def _value(self, types: frozenset[str], name: str = "") -> Steps[bool]:
        """Stream the value that begins here as JSON. Returns True when it is complete. Text that is consumed but not streamed is
        kept. name is the function whose arguments these are."""
        closers: list[str] = []
        is_first = False
        while True:
            key_types = types
            if closers:
                self.text.keep((yield from self.text.space()))
                if (yield from self.text.accept(closers[-1])):
                    self.text.forget()
                    yield self.calls.arguments(closers.pop())
                    if not closers:
                        return True
                    is_first = False
                    continue
                if not is_first and not (yield from self.text.accept(",")):
                    return False
                yield from self.text.space()
                key_types = frozenset({"string", "number", "boolean", "null"})
                prefix = "" if is_first else ", "
                if closers[-1] == "}":
                    key = yield from self._key()
                    if not key or not (yield from self.text.accept(":")):
                        return False
                    if len(closers) == 1:
                        key_types = parameter_types(self.calls.parameters(name), key)
                    prefix += f"{json.dumps(key, ensure_ascii=False)}: "
                    yield from self.text.space()
                elif (yield from self.text.peek()) in ("", "]", ","):
                    return False
                self.text.forget()
                if prefix:
                    yield self.calls.arguments(prefix)
            char = yield from self.text.peek()
            if char in CLOSERS and char:
                yield self.calls.arguments(self.text.take(1))
                closers.append(CLOSERS[char])
                is_first = True
                continue
            if not (yield from self._atom(key_types)):
                return False
            is_first = False

    def _key(self) -> Steps[str]:
        """A key, bare or between two <escape>; "" if there is no key here."""
        if (yield from self.text.accept(ESCAPE)):
            key, end = yield from self.text.until(ESCAPES)
            return key if end else ""
        return (yield from self.text.word(KEY)).strip()

    def _atom(self, types: frozenset[str]) -> Steps[bool]:
        """A string between two <escape>, which is streamed, or a bare value."""
        if (yield from self.text.accept(ESCAPE)):
            yield self.calls.arguments('"')
            steps = self.text.pieces(ESCAPES, Content)
            while True:
                try:
                    event = next(steps)
                except StopIteration as end:
                    if end.value:
                        yield self.calls.arguments('"')
                    return bool(end.value)
                if isinstance(event, Content):
                    yield self.calls.arguments(json.dumps(event.text, ensure_ascii=False)[1:-1])
                else:
                    yield None
        bare = yield from self.text.ahead_word(BARE)
        if not bare.strip() or not (yield from self.text.ahead(len(bare) + 1))[len(bare) :]:
            return False
        yield self.calls.arguments(coerce(self.text.take(len(bare)).strip(), types))
        return True
