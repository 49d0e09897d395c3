"""The text of one completion, which parsers written as generators read from front to back while it
arrives.

A reading method is a generator (`Steps`): it yields events, and None when it cannot continue
without more text; its return value is what it found. So the code follows the order in which a
format is read:

    while (yield from text.prose(MARKERS)):
        if (yield from text.accept("{")): ...

Nothing is consumed before its meaning is decided. So the place where a format is broken does not
depend on how the text was cut into pieces, and all text that was not turned into events can be
given back as content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from pegboard.interfaces.output_parser import Content, Event
from pegboard_chat.parsing.markers import Markers, Stops

T = TypeVar("T")
Steps: TypeAlias = Generator[Event | None, None, T]
"""A generator that yields events, or None when it needs more text, and returns T."""

SPACE = re.compile(r"\s*")
NAME = re.compile(r"[\w.:/-]*")
"""Characters of function names."""
SPACED_NAME = re.compile(rf"\s*{NAME.pattern}\s*")
MAX_WORD = 256
"""Maximum length of names, numbers and the like, which are held back until they are complete."""


class TextReader:
    """The text that has arrived so far. Plugins read it; core fills and closes it."""

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._kept: list[str] | None = None
        self._blank = ""
        self._call_end = 0
        self.is_closed = False

    def append(self, text: str) -> None:
        """Add text that has arrived. One consumed character stays, for `is_quoted`."""
        start = max(self._place - 1, 0)
        self._text = self._text[start:] + text
        self._place = self._place - start
        self._call_end -= start

    def close(self) -> None:
        """Record that no more text will arrive."""
        self.is_closed = True

    # --- giving back text that is not a call ------------------------------------------------------

    def keep(self, before: str = "") -> None:
        """Remember the text that is consumed from now on, with `before` in front, because it may
        turn out not to be a call."""
        self._kept = [before]

    def forget(self) -> None:
        """Forget the remembered text. It has become events or was markup, so it will not be given
        back."""
        self._kept = None

    def give_back(self) -> list[Event]:
        """Return the text since `keep` as content, because it was not a call. The result is empty
        if nothing was kept."""
        kept = "".join(self._kept or ())
        self._kept = None
        return [Content(kept)] if kept else []

    # --- access to single characters --------------------------------------------------------------

    def window(self) -> tuple[str, int]:
        """Return (text, place): the unconsumed text begins at `place`. This is valid until more
        text arrives."""
        return self._text, self._place

    def is_at_end(self) -> bool:
        """Return whether all text is consumed and no more will arrive."""
        return self.is_closed and self._place == len(self._text)

    def take(self, count: int) -> str:
        """Consume `count` characters, which must have arrived."""
        start = self._place
        self._place = self._place + count
        taken = self._text[start : self._place]
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def put_back(self, marker: str) -> None:
        """Undo the `take` of a marker that was consumed last, because another reader needs it.
        Nothing may be kept."""
        assert self._kept is None and self._text.endswith(marker, 0, self._place), marker
        self._place -= len(marker)

    def end_call(self) -> None:
        """Record that the text before this place was a call, so its quotation marks quote nothing
        that follows."""
        self._call_end = self._place

    def is_quoted(self, marker: str) -> bool:
        """Return whether there is a quotation mark before the marker, which was consumed last."""
        place = self._place - len(marker) - 1
        return place >= max(0, self._call_end) and self._text[place] in "\"'`"

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it, or "" at the end of the text."""
        while self._place == len(self._text):
            if self.is_closed:
                return ""
            yield None
        return self._text[self._place]

    def ahead(self, count: int) -> Steps[str]:
        """Return the next `count` characters without consuming them. There are fewer at the end of
        the text."""
        while len(self._text) - self._place < count and not self.is_closed:
            yield None
        return self._text[self._place : self._place + count]

    def ahead_word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Return what `word` would return, without consuming it."""
        while True:
            match = pattern.match(self._text, self._place)
            length = match.end() - self._place if match else 0
            if length > MAX_WORD:
                return ""
            if self.is_closed or self._place + length < len(self._text):
                return self._text[self._place : self._place + length]
            yield None

    def stops(self, stops: Stops | None) -> Steps[bool]:
        """Return whether one of `stops` comes next."""
        if stops is None:
            return False
        while True:
            place, marker = stops.find(self._text, self._place, self.is_closed)
            if place > self._place:
                return False
            if marker is not None:
                return (yield from self.is_stop(stops, marker))
            if self.is_closed:
                return False
            yield None

    def is_stop(self, stops: Stops, marker: str) -> Steps[bool]:
        """Return whether the marker, which comes next, ends a value."""
        expected = stops.before.get(marker)
        if expected is None:
            return True
        between = SPACED_NAME if marker in stops.named else SPACE
        while True:
            match = between.match(self._text, self._place + len(marker))
            assert match is not None
            here = self._text[match.end() : match.end() + max(map(len, expected), default=1)]
            if here.startswith(expected) or (self.is_closed and not here):
                return True
            if self.is_closed or (here and not any(text.startswith(here) for text in expected)):
                return False
            yield None

    # --- reading ----------------------------------------------------------------------------------

    def accept(self, *texts: str) -> Steps[str]:
        """If one of `texts` comes next, consume and return it (the longest that fits). Otherwise
        return ""."""
        while True:
            here = self._text[self._place : self._place + max(map(len, texts))]
            fits = [text for text in texts if here.startswith(text)]
            undecided = any(len(text) > len(here) and text.startswith(here) for text in texts)
            if self.is_closed or not undecided:
                return self.take(len(max(fits, key=len))) if fits else ""
            yield None

    def word(self, pattern: re.Pattern[str] = NAME) -> Steps[str]:
        """Consume and return the longest run of characters that `pattern` (of the form `[…]*`)
        matches. Return "" and consume nothing if there is none or it is longer than MAX_WORD."""
        return self.take(len((yield from self.ahead_word(pattern))))

    def space(self) -> Steps[str]:
        """Consume and return white space."""
        parts: list[str] = []
        while True:
            match = SPACE.match(self._text, self._place)
            assert match is not None
            parts.append(self.take(match.end() - self._place))
            if self.is_closed or self._place < len(self._text):
                return "".join(parts)
            yield None

    def pieces(self, markers: Markers, wrap: Callable[[str], Event]) -> Steps[str]:
        """Stream the text up to the next marker as events made by `wrap`. Consume the marker and
        return it, or return "" if the text ended first."""
        while True:
            place, marker = markers.find(self._text, self._place, self.is_closed)
            if place > self._place:
                yield wrap(self.take(place - self._place))
            if marker is not None:
                if not isinstance(markers, Stops) or (yield from self.is_stop(markers, marker)):
                    return self.take(len(marker))
                yield wrap(self.take(len(marker)))
                continue
            if self.is_closed:
                return ""
            yield None

    def until(self, markers: Markers) -> Steps[tuple[str, str]]:
        """Consume the text up to the next marker, and the marker, without events. Return (text
        before, marker); marker is "" if the text ended first."""
        parts: list[str] = []
        while True:
            place, marker = markers.find(self._text, self._place, self.is_closed)
            parts.append(self.take(place - self._place))
            if marker is not None:
                if not isinstance(markers, Stops) or (yield from self.is_stop(markers, marker)):
                    return "".join(parts), self.take(len(marker))
                parts.append(self.take(len(marker)))
                continue
            if self.is_closed:
                return "".join(parts), ""
            yield None

    def prose(self, markers: Markers, *, keep_space: bool = False) -> Steps[str]:
        """Stream the text up to the next marker as content. Return the marker, which is kept (see
        `keep`), or "" at the end. White space alone before a marker separates calls. It is dropped,
        but it is kept with the marker in case the marker does not begin a call. At the end of the
        text it is dropped unless `keep_space`.
        """
        blank = self._blank
        self._blank = ""
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
        """If one of `texts` comes next, with or without white space before it, consume and return
        it. Otherwise return "", and `prose` reads the white space next. Use it for the optional end
        marker of a complete call."""
        blank = yield from self.space()
        closes = yield from self.accept(*texts)
        self._blank = "" if closes else blank
        return closes


def collected(steps: Steps[T]) -> Steps[tuple[str, T]]:
    """Run `steps` without yielding its events. Return the text of its Content events and its return
    value."""
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
