"""Reads one JSON value (RFC 8259) from streamed text. The value is checked but not decoded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from pegboard.interfaces.output_parser import Content, Event
from pegboard_chat.parsing.markers import Stops
from pegboard_chat.parsing.reader import Steps, TextReader, collected

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
SCALAR_CHARACTERS = re.compile(r"[-+.\w]*")
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
SCALAR_BEGUN = re.compile(
    r"-?[0-9]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]*)?|t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?"
)


def stream_json(
    text: TextReader, wrap: Callable[[str], Event], stops: Stops | None = None
) -> Steps[bool]:
    """Stream the JSON value that begins here as events made by `wrap`, each part as soon as it is
    certain. Return True when the value is complete. Return False at the end of the text, or before
    the first character that cannot belong to the value; everything before it is in the events.
    Control characters inside strings are escaped, because models write them although JSON forbids
    them. All consumed text is streamed. stops: markers that also end the value inside a string.
    """
    held: list[str] = []
    closing = yield from stream_json_parts(text, wrap, held, stops)
    if rest := "".join(held):
        yield wrap(rest)
    return closing is None


def stream_json_parts(
    text: TextReader, wrap: Callable[[str], Event], held: list[str], stops: Stops | None = None
) -> Steps[str | None]:
    """Like `stream_json`, but opening brackets, commas and keys are streamed together with the
    value after them. Return None when the value is complete. Otherwise return the text that
    completes what was streamed ("" if nothing was); `held` then contains what was consumed since
    the last event. stops: markers that also end the value inside a string.
    """
    closers: list[str] = []
    expected = "value"
    num_certain = 0

    def certain(part: str) -> Event:
        nonlocal num_certain
        part = "".join(held) + part
        num_certain = len(closers)
        held.clear()
        return wrap(part)

    while True:
        if closers:
            held.append((yield from text.space()))
        char = yield from text.peek()
        if closers and char == closers[-1] and expected in ("more", "first key", "first value"):
            closers.pop()
            yield certain(text.take(1))
            expected = "more"
        elif char == "[" and (yield from text.stops(stops)):  # a marker that begins with a bracket
            break
        elif expected in ("value", "first value") and char in ("{", "["):
            held.append(text.take(1))
            closers.append("}" if char == "{" else "]")
            expected = "first key" if char == "{" else "first value"
        elif expected in ("value", "first value"):
            is_string = char == '"'
            if not (
                yield from (_string(text, certain, stops) if is_string else _scalar(text, certain))
            ):
                return ('"' if is_string else "") + "".join(reversed(closers[:num_certain]))
            expected = "more"
        elif expected in ("key", "first key") and char == '"':
            key, is_whole = yield from collected(_string(text, Content, stops))
            held.append(key)
            if not is_whole:
                break
            expected = "colon"
        elif expected == "colon" and char == ":":
            held.append(text.take(1))
            expected = "value"
        elif expected == "more" and char == ",":
            held.append(text.take(1))
            expected = "key" if closers[-1] == "}" else "value"
        else:
            break
        if not closers:
            return None
    return "".join(reversed(closers[:num_certain]))


def take_json(text: TextReader, stops: Stops | None = None) -> Steps[str | None]:
    """Consume the JSON value that begins here and return its text. Return None if it is broken or
    cut off; the part that was read is then consumed."""
    value, is_whole = yield from collected(stream_json(text, Content, stops))
    return value if is_whole else None


def _string(
    text: TextReader, wrap: Callable[[str], Event], stops: Stops | None = None
) -> Steps[bool]:
    yield wrap(text.take(1))
    while True:
        window, place = text.window()
        match = PLAIN.match(window, place)
        assert match is not None
        end = match.end()
        marker = None
        if stops is not None:
            end, marker = stops.find(window, place, text.is_closed or end < len(window), end)
        if end > place:
            yield wrap(text.take(end - place))
        if stops is not None and marker is not None:
            if (yield from text.is_stop(stops, marker)):
                return False
            yield wrap(text.take(len(marker)))
            continue
        if end < match.end():  # the beginning of a marker
            yield None
            continue
        char = yield from text.peek()
        if char == '"':
            yield wrap(text.take(1))
            return True
        if char == "\\":
            ahead = yield from text.ahead(2)
            if ahead == "\\u":
                ahead = yield from text.ahead(6)
            if ESCAPE.fullmatch(ahead):
                yield wrap(text.take(len(ahead)))
                continue
            if ESCAPE_BEGUN.fullmatch(ahead):  # the text ends here
                yield wrap(text.take(len(ahead)))
            return False
        if char == "":
            return False
        if char < " ":
            text.take(1)
            yield wrap(json.dumps(char)[1:-1])


def _scalar(text: TextReader, wrap: Callable[[str], Event]) -> Steps[bool]:
    """Stream a number or word. It is held back until it is complete, because 1 may become 12."""
    run = yield from text.ahead_word(SCALAR_CHARACTERS)
    if not run:
        return False
    window, place = text.window()
    is_last = text.is_closed and place + len(run) == len(window)
    if SCALAR.fullmatch(run) or (is_last and SCALAR_BEGUN.fullmatch(run)):
        yield wrap(text.take(len(run)))
        return SCALAR.fullmatch(run) is not None
    return False
