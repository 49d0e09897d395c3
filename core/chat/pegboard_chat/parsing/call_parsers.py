"""Tool parsers for two common formats: calls written as tags, and JSON objects in an element. Only
the model's markers are missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.call_constraint import constrained_calls
from pegboard_chat.parsing.json_calls import CallKeys, read_call_list, read_call_object
from pegboard_chat.parsing.markers import Markers, Stops
from pegboard_chat.parsing.reader import Steps
from pegboard_chat.parsing.stream_parser import StreamParser
from pegboard_chat.parsing.tag_constraint import constrained_tags
from pegboard_chat.parsing.tags import TagFormat, read_tagged_call


class TaggedToolParser(StreamParser):
    """Reads calls written as tags. A subclass sets the tags around a section of calls, the text
    that opens a call in it, and the rest of a call's format. A section without its start tag is
    also read, because models sometimes omit it. An empty section is dropped. is_quotable: a value
    may contain the tags of the section, because they are plain text to the model; they end it only
    where a section's end and the next section's start, or the end of the text, follow one
    another."""

    section: ClassVar[str]
    section_end: ClassVar[str]
    opening: ClassVar[str]
    tags: ClassVar[TagFormat]
    is_quotable: ClassVar[bool] = False
    _starts: ClassVar[Markers]

    def __init_subclass__(cls) -> None:
        cls._starts = Markers(cls.section, cls.opening)
        cls.ends = (cls.section_end,)
        around = (cls.section, cls.section_end, cls.opening)
        if cls.is_quotable:
            before = {cls.section_end: (cls.section, cls.opening), cls.section: (cls.opening,)}
            cls.tags = replace(cls.tags, around=around, value_stops_before=before)
        else:
            cls.tags = replace(
                cls.tags,
                around=around,
                value_stops=(*cls.tags.value_stops, cls.section, cls.section_end),
            )

    def read(self) -> Steps[None]:
        while marker := (yield from self.prose(self._starts)):
            yield from self.attempt(self._call(marker))

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        openings = [
            (self.section, f"{self.section}{self.tags.line}{self.opening}"),
            (self.opening, self.opening),
        ]
        return constrained_tags(tools, self.tags, openings) if choice == "auto" else None

    def _call(self, marker: str) -> Steps[bool]:
        if marker == self.section:
            yield from self.text.space()
            if (yield from self.text.accept(self.section_end)):
                return True
            if not (yield from self.text.accept(self.opening)):
                return False
        if not (yield from read_tagged_call(self.text, self.calls, self.tags)):
            return False
        yield from self.text.closing(self.section_end)
        return True


class JSONToolParser(StreamParser):
    """Reads calls that are JSON objects in an element. A subclass sets the element's tags, the
    objects' keys, whether one element may contain a list of calls, and the text that the model
    writes between tags and object (`brackets`), which strict calls must follow. An empty element is
    dropped. A string in a call may contain the tags; they end it only where an element's end and
    the next element's start, or the end of the text, follow one another."""

    start: ClassVar[str]
    end: ClassVar[str]
    keys: ClassVar[CallKeys] = CallKeys(needs_arguments=False)
    takes_lists: ClassVar[bool] = False
    brackets: ClassVar[tuple[str, str]] = ("\n", "\n")
    _starts: ClassVar[Markers]
    _stops: ClassVar[Stops]

    def __init_subclass__(cls) -> None:
        cls._starts = Markers(cls.start)
        cls.ends = (cls.end,)
        cls._stops = Stops(before={cls.end: (cls.start,), cls.start: ("{", "[")})

    def read(self) -> Steps[None]:
        while (yield from self.prose(self._starts)):
            yield from self.attempt(self._element())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        before, after = self.brackets

        def begin(name: str) -> str:
            return f'{self.start}{before}{{"name": {json.dumps(name)}, "arguments": '

        return (
            constrained_calls(tools, begin, f"}}{after}{self.end}", [self.start])
            if choice == "auto"
            else None
        )

    def _element(self) -> Steps[bool]:
        yield from self.text.space()
        if (yield from self.text.accept(self.end)):
            return True
        is_list = self.takes_lists and (yield from self.text.peek()) == "["
        read = read_call_list if is_list else read_call_object
        if not (yield from read(self.text, self.calls, self.keys, stops=self._stops)):
            return False
        self.text.forget()
        yield from self.text.closing(self.end)
        return True
