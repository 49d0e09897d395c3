"""Tool calls written as tags: `<function=f><parameter=k>v</parameter></function>`, `<invoke name="f">…</invoke>` and the like."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pegboard.interfaces.output_parser import Content
from pegboard_chat.parsing.coercion import coerce, parameter_types
from pegboard_chat.parsing.markers import Markers
from pegboard_chat.parsing.reader import NAME, Steps, TextReader
from pegboard_chat.parsing.stream_parser import Calls

KEY = re.compile(r"[^<>\n\"]*")
STRING = frozenset({"string"})


@dataclass(frozen=True)
class TagFormat:
    """How a call is written, from its name to its end. White space may be between the parts.

    name_end: "" if the name ends at the first parameter. key_end: if value_start is "", the value begins directly after it.
    string_key_ends, json_key_ends: they replace key_end if the tag itself says whether the value is a string or JSON. Other
    values are coerced by the tool's schema. value_stops: texts that also end a value, because models forget value_end, and that
    begin the next part. trim: what is removed at both ends of a value: one newline, all white space, or nothing. line, pad: the
    text that the model writes between the parts and around a value, which strict calls must also have.
    """

    key_start: str
    key_end: str
    value_end: str
    end: str
    name_end: str = ""
    value_start: str = ""
    string_key_ends: tuple[str, ...] = ()
    json_key_ends: tuple[str, ...] = ()
    value_stops: tuple[str, ...] = ()
    trim: Literal["newline", "space", "nothing"] = "newline"
    line: str = "\n"
    pad: str = ""
    inside: Markers = field(init=False, repr=False, compare=False)
    value_ends: Markers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inside", Markers(self.key_start, self.end))
        object.__setattr__(self, "value_ends", Markers(self.value_end, *self.value_stops))


def read_tagged_call(text: TextReader, calls: Calls, tags: TagFormat) -> Steps[bool]:
    """Read a call from its name on (the text before the name is already consumed). Returns True for a complete call. The call
    begins when its name is certain. Strings are streamed; other values are sent when they are complete. Text in the place of a
    parameter is content, and the call continues after it. Returns False as in `read_call_object`.
    """
    yield from text.space()
    name = yield from text.word(NAME)
    if not name or (tags.name_end and not (yield from text.accept(tags.name_end))):
        return False
    if not tags.name_end:
        yield from text.space()
        length = max(len(tags.key_start), len(tags.end))
        if not (yield from text.ahead(length)).startswith((tags.key_start, tags.end)):
            return False
    text.forget()
    yield calls.start(name)
    parameters, is_first = calls.parameters(name), True
    marker = yield from _next_tag(text, tags)
    while marker == tags.key_start:
        key, types = yield from _key(text, tags)
        if key is None:
            yield from text.give_back()
            marker = yield from _next_tag(text, tags)
            continue
        text.forget()
        yield calls.arguments(f"{'{' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        is_first = False
        marker = yield from _value(text, calls, tags, types or parameter_types(parameters, key))
        if marker == tags.value_end:
            marker = yield from _next_tag(text, tags)
    if marker != tags.end:
        return False
    yield calls.arguments("{}" if is_first else "}")
    yield calls.end()
    return True


def _next_tag(text: TextReader, tags: TagFormat) -> Steps[str]:
    marker = yield from text.prose(tags.inside)
    if marker != tags.key_start:
        text.forget()
    return marker


def _key(text: TextReader, tags: TagFormat) -> Steps[tuple[str | None, frozenset[str]]]:
    """Read the key of a parameter. Return it and its types, if the tag gives them, or None if this is not a parameter."""
    key = (yield from text.word(KEY)).strip()
    ends: Mapping[str, frozenset[str]] = {
        tags.key_end: frozenset(),
        **dict.fromkeys(tags.string_key_ends, STRING),
        **dict.fromkeys(tags.json_key_ends, frozenset({"json"})),
    }
    end = yield from text.accept(*ends)
    if not key or not end:
        return None, frozenset()
    if tags.value_start:
        yield from text.space()
        if not (yield from text.accept(tags.value_start)):
            return None, frozenset()
    return key, ends[end]


def _value(text: TextReader, calls: Calls, tags: TagFormat, types: frozenset[str]) -> Steps[str]:
    """Stream one value as JSON. Return the marker that ended it, or "" at the end of the text, where a string stays open."""
    if types != STRING:
        value, marker = yield from text.until(tags.value_ends)
        if tags.trim == "newline":
            value = value.removeprefix("\n").removesuffix("\n")
        elif tags.trim == "space":
            value = value.strip()
        if value or marker:
            yield calls.arguments(coerce(value, types))
        return marker
    if tags.trim == "newline":
        yield from text.accept("\n")
    elif tags.trim == "space":
        yield from text.space()
    yield calls.arguments('"')
    held: list[str] = []
    steps = text.pieces(tags.value_ends, Content)
    while True:
        try:
            event = next(steps)
        except StopIteration as end:
            marker = end.value
            break
        if event is None:
            yield None
            continue
        assert isinstance(event, Content)
        piece = event.text
        kept = len(_trimmed(piece, tags))
        if kept or tags.trim == "newline":
            if certain := "".join(held) + piece[:kept]:
                yield calls.arguments(json.dumps(certain, ensure_ascii=False)[1:-1])
            held = [piece[kept:]]
        else:
            held.append(piece)
    if marker:
        yield calls.arguments('"')
    return marker


def _trimmed(piece: str, tags: TagFormat) -> str:
    """Return the part of the text that belongs to the value even if the value ends after `piece`."""
    return piece.rstrip() if tags.trim == "space" else piece.removesuffix("\n") if tags.trim == "newline" else piece
