"""Reads Python literals and calls from streamed text and writes them as JSON while they arrive. Nothing is evaluated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from pegboard.interfaces.output_parser import Event
from pegboard_chat.parsing.json_text import SCALAR, SCALAR_CHARACTERS
from pegboard_chat.parsing.reader import NAME, Steps, TextReader
from pegboard_chat.parsing.stream_parser import Calls

QUOTES = ('"""', "'''", '"', "'")
PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}
HEX_ESCAPES = {"x": 4, "u": 6, "U": 10}
SIMPLE_ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
OCTAL = re.compile(r"[0-7]{1,3}")
NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
CLOSERS = {"[": "]", "(": ")", "{": "}"}
KEYWORD = re.compile(r"\w*")


def json_string(text: str) -> str:
    """Return `text` as the inside of a JSON string. Invalid Unicode (half a surrogate pair) stays an escape."""
    return json.dumps(text, ensure_ascii=not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text))[1:-1]


def stream_python(text: TextReader, wrap: Callable[[str], Event]) -> Steps[bool]:
    """Stream the Python literal that begins here as JSON: strings, numbers, True, False, None (and JSON's words), lists, tuples
    (as lists) and dicts (keys as strings). Returns True when it is complete, and False as in `stream_json`."""
    closers: list[str] = []
    expected = "value"
    separator = ""
    while True:
        if closers:
            yield from text.space()
        char = yield from text.peek()
        if closers and char == closers[-1] and expected in ("more", "item"):
            text.take(1)
            yield wrap("}" if closers.pop() == "}" else "]")
            expected, separator = "more", ""
        elif expected in ("value", "item"):
            if separator:
                yield wrap(separator)
                separator = ""
            if char in CLOSERS and char and not (expected == "item" and closers[-1] == "}"):
                yield wrap("{" if text.take(1) == "{" else "[")
                closers.append(CLOSERS[char])
                expected = "item"
                continue
            is_key = expected == "item" and closers[-1] == "}"
            if not (yield from _atom(text, wrap, is_key)):
                return False
            if is_key:
                yield from text.space()
                if not (yield from text.accept(":")):
                    return False
                yield wrap(": ")
                yield from text.space()
                expected = "value"
                continue
            expected = "more"
        elif expected == "more" and char == ",":
            text.take(1)
            separator, expected = ", ", "item"
        else:
            return False
        if not closers:
            return True


def read_python_call(text: TextReader, calls: Calls) -> Steps[bool]:
    """Read `name(key=literal, …)`; its arguments stream as a JSON object. Returns True for a complete call, and False for text
    that is not a call, for example with positional arguments. In that case the text that was consumed but not turned into events
    is kept, to be given back."""
    name = yield from text.word(NAME)
    yield from text.space()
    if not name or not (yield from text.accept("(")):
        return False
    is_started = False
    while True:
        yield from text.space()
        if (yield from text.accept(")")):
            if not is_started:
                text.forget()
                yield calls.start(name)
            yield calls.arguments("}" if is_started else "{}")
            yield calls.end()
            text.keep()
            return True
        key = yield from text.word(KEYWORD)
        yield from text.space()
        if not key or not (yield from text.accept("=")):
            return False
        text.forget()
        if not is_started:
            yield calls.start(name)
        yield calls.arguments(f"{', ' if is_started else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        is_started = True
        yield from text.space()
        if not (yield from stream_python(text, calls.arguments)):
            return False
        text.keep()
        yield from text.space()
        if not (yield from text.accept(",")) and (yield from text.peek()) != ")":
            return False


def read_python_calls(text: TextReader, calls: Calls) -> Steps[bool]:
    """Read `[f(a=1), g(b="x")]`, a list of at least one call. Like `read_python_call` otherwise."""
    if not (yield from text.accept("[")):
        return False
    while True:
        yield from text.space()
        if not (yield from read_python_call(text, calls)):
            return False
        yield from text.space()
        separator = yield from text.accept(",", "]")
        if separator == ",":
            yield from text.space()
            separator = yield from text.accept("]")
            if not separator:
                continue
        return separator == "]"


def _atom(text: TextReader, wrap: Callable[[str], Event], is_key: bool) -> Steps[bool]:
    quote = yield from text.accept(*QUOTES)
    if quote:
        return (yield from _string(text, wrap, quote))
    run = yield from text.ahead_word(SCALAR_CHARACTERS)
    value = _scalar(run)
    if value is None:
        return False
    text.take(len(run))
    yield wrap(f'"{value}"' if is_key else value)
    return True


def _scalar(run: str) -> str | None:
    """Read a number or one of the words, and return it as JSON."""
    if run in WORDS:
        return WORDS[run]
    if SCALAR.fullmatch(run):
        return run
    if not NUMBER.fullmatch(run):
        return None
    digits = run.replace("_", "")
    number = float(digits) if re.search(r"[.eE]", digits) else int(digits)
    return json.dumps(number) if math.isfinite(number) else None


def _string(text: TextReader, wrap: Callable[[str], Event], quote: str) -> Steps[bool]:
    yield wrap('"')
    while True:
        window, place = text.window()
        found = PLAIN[quote[0]].match(window, place)
        if found is not None and found.end() > place:
            yield wrap(json_string(text.take(found.end() - place)))
        char = yield from text.peek()
        if char == "":
            return False
        if char == "\\":
            yield wrap(json_string((yield from _escape(text))))
        elif char == quote[0]:
            if (yield from text.accept(quote)):
                yield wrap('"')
                return True
            yield wrap(json_string(text.take(1)))  # one quote inside a string with three


def _escape(text: TextReader) -> Steps[str]:
    """Consume a backslash and the characters that belong to it, and return the character that they stand for. An unknown escape
    stands for itself, as in Python."""
    ahead = yield from text.ahead(2)
    letter = ahead[1:]
    if letter in SIMPLE_ESCAPES:
        text.take(2)
        return SIMPLE_ESCAPES[letter]
    if letter in HEX_ESCAPES:
        length = HEX_ESCAPES[letter]
        ahead = yield from text.ahead(length)
        if re.fullmatch(rf"[0-9a-fA-F]{{{length - 2}}}", ahead[2:]) and int(ahead[2:], 16) < 0x110000:
            text.take(length)
            return chr(int(ahead[2:], 16))
    elif letter and letter in "01234567":
        found = OCTAL.match((yield from text.ahead(4)), 1)
        assert found is not None
        text.take(found.end())
        return chr(int(found.group(), 8))
    return text.take(1)
