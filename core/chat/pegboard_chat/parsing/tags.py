"""Tool calls written as tags: `<function=f><parameter=k>v</parameter></function>`, `<invoke
name="f">…</invoke>` and the like."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pegboard.interfaces.output_parser import Content
from pegboard_chat.parsing.coercion import coerce, parameter_types
from pegboard_chat.parsing.markers import Markers, Stops
from pegboard_chat.parsing.reader import NAME, Steps, TextReader
from pegboard_chat.parsing.stream_parser import Calls

KEY = re.compile(r"[^<>\n\"]*")
STRING = frozenset({"string"})


@dataclass(frozen=True)
class TagFormat:
    """How a call is written, from its name to its end. White space may be between the parts.

    name_end: "" if the name ends at the first parameter. key_end: if value_start is "", the value
    begins directly after it. string_key_ends, json_key_ends: they replace key_end if the tag itself
    says whether the value is a string or JSON. Other values are coerced by the tool's schema.
    value_stops: texts that also end a value, because models forget value_end, and that begin the
    next part. value_stops_before, value_stops_named: see `Stops`. around: the texts around calls;
    they also end a call whose `end` is missing. trim: what is removed at both ends of a value: one
    newline, all white space, or nothing. line, pad: the text that the model writes between the
    parts and around a value, which strict calls must also have.
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
    value_stops_before: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    value_stops_named: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    trim: Literal["newline", "space", "nothing"] = "newline"
    line: str = "\n"
    pad: str = ""
    inside: Markers = field(init=False, repr=False, compare=False)
    loose: tuple[str, ...] = field(init=False, repr=False, compare=False)
    value_ends: Stops = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        loose = (
            (self.value_end, self.key_end, self.value_start)
            if self.value_start
            else (self.value_end,)
        )
        object.__setattr__(self, "loose", loose)
        object.__setattr__(
            self,
            "inside",
            Markers(*dict.fromkeys([self.key_start, self.end, *loose, *self.around])),
        )
        object.__setattr__(
            self,
            "value_ends",
            Stops(
                self.value_end,
                *self.value_stops,
                before=self.value_stops_before,
                named=self.value_stops_named,
            ),
        )


def read_tagged_call(text: TextReader, calls: Calls, tags: TagFormat) -> Steps[bool]:
    """Read a call from its name on (the text before the name is already consumed). Returns True for
    a complete call, which may lack its end if the next call or the end of the section follows. The
    call begins when its name is certain. Strings are streamed; other values are sent when they are
    complete. Text in the place of a parameter is content, and the call continues after it. At the
    end of the text, a call that is between two parameters has complete JSON as its arguments.
    Returns False as in `read_call_object`.
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
    parameters = calls.parameters(name)
    is_first = True
    marker = yield from _next_tag(text, tags)
    while marker == tags.key_start:
        key, types = yield from _key(text, tags)
        if key is None:
            yield from text.give_back()
            marker = yield from _next_tag(text, tags, is_text=True)
            continue
        text.forget()
        yield calls.arguments(f"{'{' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        is_first = False
        marker = yield from _value(text, calls, tags, types or parameter_types(parameters, key))
        if not marker:
            return False
        if marker == tags.value_end:
            marker = yield from _next_tag(text, tags)
        elif marker == tags.key_start:  # the next key may turn out to be none
            text.keep(marker)
    yield calls.arguments("{}" if is_first else "}")
    if not marker:
        return False
    yield calls.end()
    if marker == tags.end:
        yield from text.closing(tags.end, tags.value_end)
    else:
        text.put_back(marker)
    return True


def _next_tag(text: TextReader, tags: TagFormat, *, is_text: bool = False) -> Steps[str]:
    """Stream text as content up to the next parameter (whose marker is kept), or the end of the
    call. A tag without the one before it is dropped, but the end of a value is kept if it belongs
    to text that was given back (is_text)."""
    while True:
        marker = yield from text.prose(tags.inside)
        if marker == tags.value_end and is_text:
            yield from text.give_back()
        elif marker != tags.key_start:
            text.forget()
        if marker not in tags.loose:
            return marker
        is_text = is_text and marker != tags.value_end


def _key(text: TextReader, tags: TagFormat) -> Steps[tuple[str | None, frozenset[str]]]:
    """Read the key of a parameter. Return it and its types, if the tag gives them, or None if this
    is not a parameter."""
    key = (yield from text.word(KEY)).strip()
    ends: Mapping[str, frozenset[str]] = {
        tags.key_end: frozenset(),
        **dict.fromkeys(tags.string_key_ends, STRING),
        **dict.fromkeys(tags.json_key_ends, frozenset({"json"})),
    }
    end = yield from text.accept(*ends)
    if tags.value_start:  # models sometimes omit one of the two
        yield from text.space()
        end = (yield from text.accept(tags.value_start)) and (end or tags.key_end) or end
    return (key, ends[end]) if key and end else (None, frozenset())


def _value(text: TextReader, calls: Calls, tags: TagFormat, types: frozenset[str]) -> Steps[str]:
    """Stream one value as JSON. Return the marker that ended it, or "" at the end of the text,
    where a string stays open."""
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
    """Return the part of the text that belongs to the value even if the value ends after
    `piece`."""
    return (
        piece.rstrip()
        if tags.trim == "space"
        else piece.removesuffix("\n")
        if tags.trim == "newline"
        else piece
    )
