"""Tool calls written as JSON objects: `{"name": "f", "arguments": {…}}`, alone or in a list."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from pegboard.interfaces.output_parser import Content
from pegboard_chat.parsing.json_text import stream_json_parts, take_json
from pegboard_chat.parsing.markers import Markers, Stops
from pegboard_chat.parsing.reader import Steps, TextReader
from pegboard_chat.parsing.stream_parser import Calls


@dataclass(frozen=True, slots=True)
class CallKeys:
    """The keys of a call object. ignored: keys that may occur and have no effect ("type" only with
    the value "function"). An object with any other key is not a call. needs_arguments: an object
    without arguments is not a call; if False, it is a call with {}."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ignored: tuple[str, ...] = ("id", "type")
    needs_arguments: bool = True


KEYS = CallKeys()
WORD = re.compile(r'"(?:[^"\\\n]|\\.)*"')
WORD_BEGUN = re.compile(r'"(?:[^"\\\n]|\\.)*(?:\\|"|)')


def read_call_object(
    text: TextReader,
    calls: Calls,
    keys: CallKeys = KEYS,
    *,
    is_begun: bool = False,
    stops: Stops | None = None,
) -> Steps[bool]:
    """Read one call object, with its keys in any order. Arguments stream when the name comes before
    them. is_begun: its opening brace is consumed (it was the marker). stops: markers that end the
    object even where its JSON is not complete.

    Returns True for a complete call. Returns False if it is not a call; the text that was consumed
    but not turned into events is then kept, to be given back. A call whose arguments are complete
    is ended in both cases, and arguments that break off are completed to valid JSON, except at the
    end of the text. Arguments may be written as a string that contains a JSON object.
    """
    if not is_begun and not (yield from text.accept("{")):
        return False
    name: str | None = None
    arguments: str | None = None
    is_started = False
    while True:
        yield from text.space()
        key = yield from _take_word(text, stops)
        yield from text.space()
        if key is None or not (yield from text.accept(":")):
            return False
        yield from text.space()
        if key in keys.name and name is None:
            name = yield from _take_word(text, stops)
            if not name:
                return False
        elif key in keys.arguments and arguments is None and not is_started:
            if name is not None and (yield from text.peek()) == "{":
                if not (yield from _stream_arguments(text, calls, name, stops=stops)):
                    return False
                is_started = True
            else:
                arguments = yield from _take_arguments(text, stops)
                if arguments is None:
                    return False
        elif key not in keys.ignored:
            return False
        else:
            value = yield from take_json(text, stops)
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


def read_call_list(
    text: TextReader, calls: Calls, keys: CallKeys = KEYS, *, stops: Stops | None = None
) -> Steps[bool]:
    """Read `[{…}, {…}]`, a list of call objects. Like `read_call_object` otherwise. With `stops`,
    an object that is not a call is content up to the next object that is one, or to a stop; without
    them, a list without calls is not a list of calls."""
    if not (yield from text.accept("[")):
        return False
    yield from text.space()
    if stops is not None and (yield from text.accept("]")):
        return True
    next_objects = Markers("{", *stops.texts) if stops is not None else None
    count = calls.count
    is_begun = False
    while True:
        yield from text.space()
        if not (yield from read_call_object(text, calls, keys, is_begun=is_begun, stops=stops)):
            if next_objects is None:
                return False
            calls.abandon()
            yield from text.give_back()
            marker = yield from text.pieces(next_objects, Content)
            if marker != "{":
                if marker:
                    text.put_back(marker)
                return calls.count > count
            text.keep(marker)
            is_begun = True
            # an object inside the broken one may have a name
            keys = replace(keys, needs_arguments=True)
            continue
        text.keep()
        yield from text.space()
        separator = yield from text.accept(",", "]")
        if separator != ",":
            return separator == "]"
        is_begun = False


def read_arguments(
    text: TextReader, calls: Calls, name: str, id: str | None = None, *, stops: Stops | None = None
) -> Steps[bool]:
    """Read a JSON object as the arguments of call `name`. The call begins with the first value that
    is certain, streams and ends with the object. Returns False as in `read_call_object`."""
    if (yield from text.peek()) != "{":
        return False
    return (yield from _stream_arguments(text, calls, name, id, stops=stops))


def _stream_arguments(
    text: TextReader, calls: Calls, name: str, id: str | None = None, *, stops: Stops | None = None
) -> Steps[bool]:
    held: list[str] = []
    closing = yield from calls.stream(
        text, stream_json_parts(text, Content, held, stops), held, name, id
    )
    if closing is not None and text.is_at_end():
        return False
    is_ended = closing is None or (calls.is_open and (yield from text.stops(stops)))
    if closing:
        yield calls.arguments(closing)
    if is_ended:
        yield calls.end()
        text.keep()
    return is_ended


def _take_word(text: TextReader, stops: Stops | None) -> Steps[str | None]:
    """Consume a string that is a key or a name, which is short and on one line. Returns None, and
    consumes nothing, if there is none."""
    quoted = yield from text.ahead_word(WORD_BEGUN)
    if not WORD.fullmatch(quoted) or (
        stops is not None and any(marker in quoted for marker in stops.texts)
    ):
        return None
    try:
        word: str = json.loads(quoted)
    except ValueError:
        return None
    text.take(len(quoted))
    return word


def _take_arguments(text: TextReader, stops: Stops | None) -> Steps[str | None]:
    """Return the JSON text of an object, which may also be written as a string. Return {} for null,
    and None for anything else."""
    value = yield from take_json(text, stops)
    if value is None or value == "null":
        return value and "{}"
    if value.startswith('"'):
        value = json.loads(value).strip() or "{}"
        inner = TextReader()
        inner.append(value)
        inner.close()
        is_whole = (yield from take_json(inner)) == value
        return value if is_whole and value.startswith("{") else None
    return value if value.startswith("{") else None
