"""The text of one completion, which parsers written as generators read from front to back while it arrives.

A reading method is a generator (`Steps`): it yields events, and None when it cannot continue without more text; its return value
is what it found. So the code follows the order in which a format is read:

    while (yield from text.prose(MARKERS)):
        if (yield from text.accept("{")): ...

Nothing is consumed before its meaning is decided. So the place where a format is broken does not depend on how the text was cut
into pieces, and all text that was not turned into events can be given back as content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from pegboard.interfaces.output_parser import Content, Event
from pegboard_chat.parsing.markers import Markers

T = TypeVar("T")
Steps: TypeAlias = Generator[Event | None, None, T]
"""Yields events, None for "more text, please"; returns T."""

SPACE = re.compile(r"\s*")
NAME = re.compile(r"[\w.:/-]*")
"""Characters of function names."""
MAX_WORD = 256
"""Maximum length of names, numbers and the like, which are held back until they are complete."""


class TextReader:
    """The text that has arrived so far. Plugins read it; core fills and closes it."""

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._kept: list[str] | None = None
        self._blank = ""
        self.is_closed = False

    def append(self, text: str) -> None:
        """More text has arrived."""
        self._text, self._place = self._text[self._place :] + text, 0

    def close(self) -> None:
        """No more text will come."""
        self.is_closed = True

    # --- giving back what was not understood -------------------------------------------------------------------------

    def keep(self, before: str = "") -> None:
        """From here on, remember the consumed text (with `before` in front), because it may turn out not to be a call."""
        self._kept = [before]

    def forget(self) -> None:
        """The consumed text has become events, or was markup: nothing will be given back."""
        self._kept = None

    def give_back(self) -> list[Event]:
        """The text since `keep` as content, because it was not what it seemed. Empty when nothing was kept."""
        kept, self._kept = "".join(self._kept or ()), None
        return [Content(kept)] if kept else []

    # --- looking and taking, for mechanisms that read character by character -----------------------------------------

    def window(self) -> tuple[str, int]:
        """(text, place): the unconsumed text begins at `place`. Valid until more text arrives."""
        return self._text, self._place

    def is_at_end(self) -> bool:
        """Whether all text is consumed and no more will arrive."""
        return self.is_closed and self._place == len(self._text)

    def take(self, count: int) -> str:
        """Consume `count` characters, which must have arrived."""
        start, self._place = self._place, self._place + count
        taken = self._text[start : self._place]
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def peek(self) -> Steps[str]:
        """The next character; "" at the end of the text."""
        while self._place == len(self._text):
            if self.is_closed:
                return ""
            yield None
        return self._text[self._place]

    def ahead(self, count: int) -> Steps[str]:
        """The next `count` characters, not consumed; fewer at the end of the text."""
        while len(self._text) - self._place < count and not self.is_closed:
            yield None
        return self._text[self._place : self._place + count]

    def ahead_word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """`word` without consuming it."""
        while True:
            found = pattern.match(self._text, self._place)
            length = found.end() - self._place if found else 0
            if length > MAX_WORD:
                return ""
            if self.is_closed or self._place + length < len(self._text):
                return self._text[self._place : self._place + length]
            yield None

    # --- reading -----------------------------------------------------------------------------------------------------

    def accept(self, *texts: str) -> Steps[str]:
        """Consume whichever of `texts` comes next (the longest that fits) and return it; "" = none of them comes next."""
        while True:
            here = self._text[self._place : self._place + max(map(len, texts))]
            fits = [text for text in texts if here.startswith(text)]
            undecided = any(len(text) > len(here) and text.startswith(here) for text in texts)
            if self.is_closed or not undecided:
                return self.take(len(max(fits, key=len))) if fits else ""
            yield None

    def word(self, pattern: re.Pattern[str] = NAME) -> Steps[str]:
        """Consume and return the longest run that `pattern` (of the form `[…]*`) matches; "" = there is none, or it is longer
        than MAX_WORD (in which case nothing is consumed)."""
        return self.take(len((yield from self.ahead_word(pattern))))

    def space(self) -> Steps[str]:
        """Consume and return white space."""
        parts: list[str] = []
        while True:
            found = SPACE.match(self._text, self._place)
            assert found is not None
            parts.append(self.take(found.end() - self._place))
            if self.is_closed or self._place < len(self._text):
                return "".join(parts)
            yield None

    def pieces(self, markers: Markers, wrap: Callable[[str], Event]) -> Steps[str]:
        """Stream the text up to the next marker, wrapped. Consume the marker and return it; "" = the text ended first."""
        while True:
            place, marker = markers.find(self._text, self._place, self.is_closed)
            if place > self._place:
                yield wrap(self.take(place - self._place))
            if marker is not None:
                return self.take(len(marker))
            if self.is_closed:
                return ""
            yield None

    def until(self, markers: Markers) -> Steps[tuple[str, str]]:
        """Consume up to and with the next marker, without events: (text before, marker); marker "" = the text ended first."""
        parts: list[str] = []
        while True:
            place, marker = markers.find(self._text, self._place, self.is_closed)
            parts.append(self.take(place - self._place))
            if marker is not None:
                return "".join(parts), self.take(len(marker))
            if self.is_closed:
                return "".join(parts), ""
            yield None

    def prose(self, markers: Markers, *, keep_space: bool = False) -> Steps[str]:
        """Stream the text up to the next marker as content; returns the marker, which is kept (see `keep`), or "" at the end.

        If there is only white space before a marker, it separates calls: it is dropped, but kept with the marker in case that
        does not begin a call. At the end of the text it is dropped unless `keep_space`.
        """
        blank, self._blank = self._blank, ""
        while True:
            blank += yield from self.space()
            place, marker = markers.find(self._text, self._place, self.is_closed)
            if marker is not None and place == self._place:
                self.take(len(marker))
                self.keep(blank + marker)
                return marker
            if place > self._place:
                break
            if self.is_closed:
                if blank and keep_space:
                    yield Content(blank)
                return ""
            yield None
        if blank:
            yield Content(blank)
        marker = yield from self.pieces(markers, Content)
        self.keep(marker)
        return marker

    def closing(self, *texts: str) -> Steps[str]:
        """Consume whichever of `texts` comes next, with or without white space before it. "" = none does, and the white space
        belongs to what `prose` reads next. Use it for the optional end marker of a complete call."""
        blank = yield from self.space()
        found = yield from self.accept(*texts)
        self._blank = "" if found else blank
        return found


def collected(steps: Steps[T]) -> Steps[tuple[str, T]]:
    """The text of the Content events of `steps` (without yielding the events), and the return value of `steps`."""
    parts: list[str] = []
    while True:
        try:
            event = next(steps)
        except StopIteration as end:
            return "".join(parts), end.value
        if event is None:
            yield None
        else:
            assert isinstance(event, Content), "only content can be collected"
            parts.append(event.text)
