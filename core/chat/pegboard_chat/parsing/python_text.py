"""Reads Python literals and calls from streamed text and writes them as JSON while they arrive.
Nothing is evaluated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from pegboard.interfaces.output_parser import Content, Event
from pegboard_chat.parsing.json_text import SCALAR, SCALAR_CHARACTERS
from pegboard_chat.parsing.markers import Stops
from pegboard_chat.parsing.reader import NAME, Steps, TextReader, collected
from pegboard_chat.parsing.stream_parser import Calls

QUOTES = ('"""', "'''", '"', "'")
PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}
HEX_ESCAPES = {"x": 4, "u": 6, "U": 10}
SIMPLE_ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
OCTAL = re.compile(r"[0-7]{1,3}")
NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
CLOSERS = {"[": "]", "(": ")", "{": "}"}
KEYWORD = re.compile(r"\w*")


def json_string(text: str) -> str:
    """Return `text` as the inside of a JSON string. Invalid Unicode (half a surrogate pair) stays
    an escape."""
    return json.dumps(
        text, ensure_ascii=not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)
    )[1:-1]


def stream_python(text: TextReader, wrap: Callable[[str], Event]) -> Steps[bool]:
    """Stream the Python literal that begins here as JSON: strings, numbers, True, False, None (and
    JSON's words), lists, tuples (as lists) and dicts (keys as strings). Returns True when it is
    complete, and False as in `stream_json`."""
    held: list[str] = []
    closing = yield from _stream_parts(text, wrap, held)
    if rest := "".join(held):
        yield wrap(rest)
    return closing is None


def _stream_parts(
    text: TextReader, wrap: Callable[[str], Event], held: list[str], stops: Stops | None = None
) -> Steps[str | None]:
    """Like `stream_json_parts`, for a Python literal. At the beginning, `held` may contain JSON
    that precedes the value."""
    closers: list[str] = []
    expected = "value"
    separator = ""
    num_certain = 0

    def certain(part: str) -> Event:
        nonlocal num_certain
        part = "".join(held) + part
        num_certain = len(closers)
        held.clear()
        return wrap(part)

    while True:
        if closers:
            yield from text.space()
        char = yield from text.peek()
        if closers and char == closers[-1] and expected in ("more", "item"):
            text.take(1)
            closer = "}" if closers.pop() == "}" else "]"
            yield certain(closer)
            expected = "more"
            separator = ""
        elif expected in ("value", "item"):
            if separator:
                held.append(separator)
                separator = ""
            if char in CLOSERS and char and not (expected == "item" and closers[-1] == "}"):
                held.append("{" if text.take(1) == "{" else "[")
                closers.append(CLOSERS[char])
                expected = "item"
                continue
            if expected == "item" and closers[-1] == "}":
                key, is_whole = yield from collected(_atom(text, Content, True, stops))
                if not is_whole:
                    break
                held.append(key)
                yield from text.space()
                if not (yield from text.accept(":")):
                    break
                held.append(": ")
                yield from text.space()
                expected = "value"
                continue
            is_string = char in ('"', "'") and char != ""
            if not (yield from _atom(text, certain, False, stops)):
                return ('"' if is_string else "") + _closing(closers[:num_certain])
            expected = "more"
        elif expected == "more" and char == ",":
            text.take(1)
            separator = ", "
            expected = "item"
        else:
            break
        if not closers:
            return None
    return _closing(closers[:num_certain])


def _closing(closers: list[str]) -> str:
    return "".join("}" if closer == "}" else "]" for closer in reversed(closers))


def read_python_call(text: TextReader, calls: Calls, stops: Stops | None = None) -> Steps[bool]:
    """Read `name(key=literal, …)`; its arguments stream as a JSON object. Returns True for a
    complete call, and False for text that is not a call, for example with positional arguments. In
    that case the text that was consumed but not turned into events is kept, to be given back.
    Arguments that break off are completed to valid JSON, except inside a value at the end of the
    text. stops: markers that end a value even inside a string."""
    name = yield from text.word(NAME)
    yield from text.space()
    if not name or not (yield from text.accept("(")):
        return False
    while True:
        yield from text.space()
        if (yield from text.accept(")")):
            if calls.is_open:
                yield calls.arguments("}")
            else:
                text.forget()
                yield calls.start(name)
                yield calls.arguments("{}")
            yield calls.end()
            text.keep()
            return True
        key = yield from text.word(KEYWORD)
        yield from text.space()
        if not key or not (yield from text.accept("=")):
            if calls.is_open:
                yield calls.arguments("}")
            return False
        yield from text.space()
        held = [f"{', ' if calls.is_open else '{'}{json.dumps(key, ensure_ascii=False)}: "]
        closing = yield from calls.stream(
            text, _stream_parts(text, Content, held, stops), held, name
        )
        if closing is not None:
            if not text.is_at_end() and calls.is_open:
                yield calls.arguments(closing + "}")
            return False
        yield from text.space()
        if not (yield from text.accept(",")) and (yield from text.peek()) != ")":
            yield calls.arguments("}")
            return False


def read_python_calls(text: TextReader, calls: Calls, stops: Stops | None = None) -> Steps[bool]:
    """Read `[f(a=1), g(b="x")]`, a list of at least one call. Like `read_python_call` otherwise."""
    if not (yield from text.accept("[")):
        return False
    while True:
        yield from text.space()
        if not (yield from read_python_call(text, calls, stops)):
            return False
        yield from text.space()
        separator = yield from text.accept(",", "]")
        if separator == ",":
            yield from text.space()
            separator = yield from text.accept("]")
            if not separator:
                continue
        return separator == "]"


def _atom(
    text: TextReader, wrap: Callable[[str], Event], is_key: bool, stops: Stops | None
) -> Steps[bool]:
    quote = yield from text.accept(*QUOTES)
    if quote:
        return (yield from _string(text, wrap, quote, stops))
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


def _string(
    text: TextReader, wrap: Callable[[str], Event], quote: str, stops: Stops | None
) -> Steps[bool]:
    yield wrap('"')
    while True:
        window, place = text.window()
        match = PLAIN[quote[0]].match(window, place)
        assert match is not None
        end = match.end()
        marker = None
        if stops is not None:
            end, marker = stops.find(window, place, text.is_closed or end < len(window), end)
        if end > place:
            yield wrap(json_string(text.take(end - place)))
        if stops is not None and marker is not None:
            if (yield from text.is_stop(stops, marker)):
                return False
            yield wrap(json_string(text.take(len(marker))))
            continue
        if end < match.end():  # the beginning of a marker
            yield None
            continue
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
    """Consume a backslash and the characters that belong to it, and return the character that they
    stand for. An unknown escape stands for itself, as in Python."""
    ahead = yield from text.ahead(2)
    letter = ahead[1:]
    if letter in SIMPLE_ESCAPES:
        text.take(2)
        return SIMPLE_ESCAPES[letter]
    if letter in HEX_ESCAPES:
        length = HEX_ESCAPES[letter]
        ahead = yield from text.ahead(length)
        if (
            re.fullmatch(rf"[0-9a-fA-F]{{{length - 2}}}", ahead[2:])
            and int(ahead[2:], 16) < 0x110000
        ):
            text.take(length)
            return chr(int(ahead[2:], 16))
    elif letter and letter in "01234567":
        match = OCTAL.match((yield from text.ahead(4)), 1)
        assert match is not None
        text.take(match.end())
        return chr(int(match.group(), 8))
    return text.take(1)
