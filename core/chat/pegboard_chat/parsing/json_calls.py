"""Tool calls written as JSON objects: `{"name": "f", "arguments": {…}}`, alone or in a list."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pegboard_chat.parsing.json_text import stream_json, take_json
from pegboard_chat.parsing.reader import Steps, TextReader
from pegboard_chat.parsing.stream_parser import Calls


@dataclass(frozen=True, slots=True)
class CallKeys:
    """The keys of a call object. ignored: keys that may occur and have no effect ("type" only with the value "function"). An
    object with any other key is not a call. needs_arguments: an object without arguments is not a call; if False, it is a call
    with {}."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ignored: tuple[str, ...] = ("id", "type")
    needs_arguments: bool = True


KEYS = CallKeys()


def read_call_object(text: TextReader, calls: Calls, keys: CallKeys = KEYS, *, is_begun: bool = False) -> Steps[bool]:
    """Read one call object, with its keys in any order. Arguments stream when the name comes before them. is_begun: its opening
    brace is consumed (it was the marker).

    Returns True for a complete call. Returns False if it is not a call; the text that was consumed but not turned into events is
    then kept, to be given back. A call whose arguments are complete is ended in both cases. Arguments may be written as a string
    that contains a JSON object.
    """
    if not is_begun and not (yield from text.accept("{")):
        return False
    name: str | None = None
    arguments: str | None = None
    is_started = False
    while True:
        yield from text.space()
        key = yield from _take_string(text)
        yield from text.space()
        if key is None or not (yield from text.accept(":")):
            return False
        yield from text.space()
        if key in keys.name and name is None:
            name = yield from _take_string(text)
            if not name:
                return False
        elif key in keys.arguments and arguments is None and not is_started:
            if name is not None and (yield from text.peek()) == "{":
                if not (yield from _stream_arguments(text, calls, name)):
                    return False
                is_started = True
            else:
                arguments = yield from _take_arguments(text)
                if arguments is None:
                    return False
        elif key not in keys.ignored:
            return False
        else:
            value = yield from take_json(text)
            if value is None or (key == "type" and value != '"function"'):
                return False
        if not is_started and name is not None and arguments is not None:
            text.forget()
            for event in calls.whole(name, arguments):
                yield event
            text.keep()
            is_started = True
        yield from text.space()
        separator = yield from text.accept(",", "}")
        if separator == "}":
            break
        if not separator:
            return False
    if not is_started and name is not None and not keys.needs_arguments:
        text.forget()
        for event in calls.whole(name, "{}"):
            yield event
        is_started = True
    return is_started


def read_call_list(text: TextReader, calls: Calls, keys: CallKeys = KEYS) -> Steps[bool]:
    """Read `[{…}, {…}]`, a list of at least one call object. Like `read_call_object` otherwise."""
    if not (yield from text.accept("[")):
        return False
    while True:
        yield from text.space()
        if not (yield from read_call_object(text, calls, keys)):
            return False
        text.keep()
        yield from text.space()
        separator = yield from text.accept(",", "]")
        if separator != ",":
            return separator == "]"


def read_arguments(text: TextReader, calls: Calls, name: str, id: str | None = None) -> Steps[bool]:
    """Read a JSON object as the arguments of call `name`. The call begins, streams and ends with the object. Returns False as in
    `read_call_object`."""
    if (yield from text.peek()) != "{":
        return False
    return (yield from _stream_arguments(text, calls, name, id))


def _stream_arguments(text: TextReader, calls: Calls, name: str, id: str | None = None) -> Steps[bool]:
    text.forget()
    yield calls.start(name, id)
    is_whole = yield from stream_json(text, calls.arguments)
    if is_whole:
        yield calls.end()
        text.keep()
    return is_whole


def _take_string(text: TextReader) -> Steps[str | None]:
    if (yield from text.peek()) != '"':
        return None
    found = yield from take_json(text)
    return None if found is None else json.loads(found)


def _take_arguments(text: TextReader) -> Steps[str | None]:
    """Return the JSON text of an object, which may also be written as a string. Return {} for null, and None for anything
    else."""
    found = yield from take_json(text)
    if found is None or found == "null":
        return found and "{}"
    if found.startswith('"'):
        found = json.loads(found).strip() or "{}"
        inner = TextReader()
        inner.append(found)
        inner.close()
        is_whole = (yield from take_json(inner)) == found
        return found if is_whole and found.startswith("{") else None
    return found if found.startswith("{") else None
