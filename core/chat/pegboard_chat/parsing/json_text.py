"""Reads one JSON value (RFC 8259) from streamed text. The value is checked but not decoded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from pegboard.interfaces.output_parser import Content, Event
from pegboard_chat.parsing.reader import Steps, TextReader, collected

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
SCALAR_CHARACTERS = re.compile(r"[-+.\w]*")
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
SCALAR_BEGUN = re.compile(r"-?[0-9]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]*)?|t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?")


def stream_json(text: TextReader, wrap: Callable[[str], Event]) -> Steps[bool]:
    """Stream the JSON value that begins here as events made by `wrap`, each part as soon as it is certain. Return True when the
    value is complete. Return False at the end of the text, or before the first character that cannot belong to the value;
    everything before it is in the events. Control characters inside strings are escaped, because models write them although JSON
    forbids them. All consumed text is streamed.
    """
    closers: list[str] = []
    expected = "value"
    while True:
        if closers and (blank := (yield from text.space())):
            yield wrap(blank)
        char = yield from text.peek()
        if closers and char == closers[-1] and expected in ("more", "first key", "first value"):
            yield wrap(text.take(1))
            closers.pop()
            expected = "more"
        elif expected in ("value", "first value"):
            if char == "{" or char == "[":
                yield wrap(text.take(1))
                closers.append("}" if char == "{" else "]")
                expected = "first key" if char == "{" else "first value"
                continue
            if not (yield from (_string(text, wrap) if char == '"' else _scalar(text, wrap))):
                return False
            expected = "more"
        elif expected in ("key", "first key") and char == '"':
            if not (yield from _string(text, wrap)):
                return False
            expected = "colon"
        elif expected == "colon" and char == ":":
            yield wrap(text.take(1))
            expected = "value"
        elif expected == "more" and char == ",":
            yield wrap(text.take(1))
            expected = "key" if closers[-1] == "}" else "value"
        else:
            return False
        if not closers:
            return True


def take_json(text: TextReader) -> Steps[str | None]:
    """Consume the JSON value that begins here and return its text. Return None if it is broken or cut off; the part that was read
    is then consumed."""
    value, is_whole = yield from collected(stream_json(text, Content))
    return value if is_whole else None


def _string(text: TextReader, wrap: Callable[[str], Event]) -> Steps[bool]:
    yield wrap(text.take(1))
    while True:
        window, place = text.window()
        found = PLAIN.match(window, place)
        if found is not None and found.end() > place:
            yield wrap(text.take(found.end() - place))
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
