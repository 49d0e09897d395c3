"""Tool calls of FunctionGemma.

    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>

Format: https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices. Strings are
written unchanged between two <escape>; numbers, true, false, null, lists and objects (with bare
keys) are written as in JSON. Other bare words are typed by the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.output_parser import Content
from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import (
    Markers,
    Notation,
    Steps,
    Stops,
    StreamParser,
    coerce,
    constrained_objects,
    parameter_types,
)

START = "<start_function_call>"
END = "<end_function_call>"
ESCAPE = "<escape>"
STARTS = Markers(START)
ESCAPES = Stops(ESCAPE, START, END)
KEY = re.compile(r"[^:{}\[\],<>]*")
ESCAPED_KEY = re.compile(f"(?:(?!{ESCAPE}|{START}|{END}).)*", re.DOTALL)
BARE = re.compile(r"[^{}\[\],<>]*")
CLOSERS = {"{": "}", "[": "]"}
NOTATION = Notation.between(
    ESCAPE, key=re.compile(r"[^:{}\[\],<>\s](?:[^:{}\[\],<>]*[^:{}\[\],<>\s])?")
)


class FunctionGemmaToolParser(StreamParser):
    ends = (END,)

    def read(self) -> Steps[None]:
        while (yield from self.prose(STARTS)):
            yield from self.attempt(self._call())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return (
            constrained_objects(tools, NOTATION, START, "call:", END) if choice == "auto" else None
        )

    def _call(self) -> Steps[bool]:
        yield from self.text.space()
        if (yield from self.text.accept(END)):  # an empty element
            return True
        if not (yield from self.text.accept("call:")):
            return False
        yield from self.text.space()
        name = yield from self.text.word()
        yield from self.text.space()
        if not name or (yield from self.text.peek()) != "{":
            return False
        self.text.forget()
        yield self.calls.start(name)
        if not (yield from self._arguments(name)):
            return False
        yield self.calls.end()
        yield from self.text.closing(END)
        return True

    def _arguments(self, name: str) -> Steps[bool]:
        """Stream the object that begins here as JSON. Returns True when it is complete, or when the
        call ends before it is. An opening bracket or a key is sent with the value after it; without
        one it is kept, to be given back, and the JSON is closed (not inside a string at the end of
        the text)."""
        closers: list[str] = []
        held = ""
        num_certain = 0
        is_first = False
        types = frozenset({"object"})
        self.text.keep()
        while True:
            if closers:
                yield from self.text.space()
                if (yield from self.text.accept(closers[-1])):
                    yield self.calls.arguments(held + closers.pop())
                    self.text.keep()
                    held = ""
                    num_certain = len(closers)
                    is_first = False
                    if not closers:
                        self.text.forget()
                        return True
                    continue
                if not is_first and not (yield from self.text.accept(",")):
                    break
                yield from self.text.space()
                types = frozenset({"string", "number", "boolean", "null"})
                held += "" if is_first else ", "
                if closers[-1] == "}":
                    key = yield from self._key()
                    if not key or not (yield from self.text.accept(":")):
                        break
                    if len(closers) == 1:
                        types = parameter_types(self.calls.parameters(name), key)
                    held += f"{json.dumps(key, ensure_ascii=False)}: "
                    yield from self.text.space()
                elif (yield from self.text.peek()) in ("", "]", ","):
                    break
            char = yield from self.text.peek()
            if char in CLOSERS and char:
                held += self.text.take(1)
                closers.append(CLOSERS[char])
                is_first = True
                continue
            if (yield from self.text.accept(ESCAPE)):
                yield self.calls.arguments(held + '"')
                self.text.forget()
                if not (marker := (yield from self._string())):
                    return False
                yield self.calls.arguments('"')
                held = ""
                num_certain = len(closers)
                is_first = False
                if marker != ESCAPE:
                    self.text.put_back(marker)
                self.text.keep()
                continue
            bare = yield from self.text.ahead_word(BARE)
            if not bare.strip() or not (yield from self.text.ahead(len(bare) + 1))[len(bare) :]:
                break
            yield self.calls.arguments(held + coerce(self.text.take(len(bare)).strip(), types))
            self.text.keep()
            held = ""
            num_certain = len(closers)
            is_first = False
        yield self.calls.arguments("".join(reversed(closers[:num_certain])) or "{}")
        is_ended = yield from self.text.stops(ESCAPES)
        if is_ended:
            self.text.forget()
        return is_ended

    def _string(self) -> Steps[str]:
        """Stream the rest of a string up to the <escape> or the marker that ends it. Return it, or
        "" at the end of the text."""
        steps = self.text.pieces(ESCAPES, Content)
        while True:
            try:
                event = next(steps)
            except StopIteration as end:
                return str(end.value)
            if isinstance(event, Content):
                yield self.calls.arguments(json.dumps(event.text, ensure_ascii=False)[1:-1])
            else:
                yield None

    def _key(self) -> Steps[str]:
        """A key, bare or between two <escape>; "" if there is no key here."""
        if (yield from self.text.accept(ESCAPE)):
            key = yield from self.text.word(ESCAPED_KEY)
            return key if (yield from self.text.accept(ESCAPE)) else ""
        return (yield from self.text.word(KEY)).strip()
