"""Tool parsers for two common formats: calls written as tags, and JSON objects in an element. Only the model's markers are
missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.call_constraint import constrained_calls
from pegboard_chat.parsing.json_calls import CallKeys, read_call_list, read_call_object
from pegboard_chat.parsing.markers import Markers
from pegboard_chat.parsing.reader import Steps
from pegboard_chat.parsing.stream_parser import StreamParser
from pegboard_chat.parsing.tag_constraint import constrained_tags
from pegboard_chat.parsing.tags import TagFormat, read_tagged_call


class TaggedToolParser(StreamParser):
    """Reads calls written as tags. A subclass sets the tags around a section of calls, the text that opens a call in it, and the
    rest of a call's format. A section without its start tag is also read, because models sometimes omit it."""

    section: ClassVar[str]
    section_end: ClassVar[str]
    opening: ClassVar[str]
    tags: ClassVar[TagFormat]
    _starts: ClassVar[Markers]

    def __init_subclass__(cls) -> None:
        cls._starts = Markers(cls.section, cls.opening)

    def read(self) -> Steps[None]:
        while marker := (yield from self.prose(self._starts)):
            yield from self.attempt(self._call(marker))

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        openings = [(self.section, f"{self.section}{self.tags.line}{self.opening}"), (self.opening, self.opening)]
        return constrained_tags(tools, self.tags, openings) if choice == "auto" else None

    def _call(self, marker: str) -> Steps[bool]:
        if marker == self.section:
            yield from self.text.space()
            if not (yield from self.text.accept(self.opening)):
                return False
        if not (yield from read_tagged_call(self.text, self.calls, self.tags)):
            return False
        yield from self.text.closing(self.section_end)
        return True


class JSONToolParser(StreamParser):
    """Reads calls that are JSON objects in an element. A subclass sets the element's tags, the objects' keys, whether one element
    may contain a list of calls, and the text that the model writes between tags and object (`brackets`), which strict calls must
    follow."""

    start: ClassVar[str]
    end: ClassVar[str]
    keys: ClassVar[CallKeys] = CallKeys(needs_arguments=False)
    takes_lists: ClassVar[bool] = False
    brackets: ClassVar[tuple[str, str]] = ("\n", "\n")
    _starts: ClassVar[Markers]

    def __init_subclass__(cls) -> None:
        cls._starts = Markers(cls.start)

    def read(self) -> Steps[None]:
        while (yield from self.prose(self._starts)):
            yield from self.attempt(self._element())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        before, after = self.brackets

        def begin(name: str) -> str:
            return f'{self.start}{before}{{"name": {json.dumps(name)}, "arguments": '

        return constrained_calls(tools, begin, f"}}{after}{self.end}", [self.start]) if choice == "auto" else None

    def _element(self) -> Steps[bool]:
        yield from self.text.space()
        is_list = self.takes_lists and (yield from self.text.peek()) == "["
        if not (yield from (read_call_list if is_list else read_call_object)(self.text, self.calls, self.keys)):
            return False
        self.text.forget()
        yield from self.text.closing(self.end)
        return True
