"""Finding markers such as `<think>` in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping


class Markers:
    """A set of texts to look for, compiled once. If several begin at one place, the longest wins. A
    search takes time linear in the text, for any number of markers.
    """

    __slots__ = ("_pattern", "_prefixes", "_reach", "texts")

    def __init__(self, *texts: str) -> None:
        assert texts and all(texts), "markers are texts of at least one character"
        self.texts = texts
        self._pattern = re.compile(
            "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
        )
        self._prefixes = frozenset(
            text[:length] for text in texts for length in range(1, len(text))
        )
        self._reach = max(len(text) for text in texts) - 1

    def find(
        self, text: str, start: int, is_end: bool, limit: int | None = None
    ) -> tuple[int, str | None]:
        """Search from `start` to `limit` (the end of the text by default). Return the place and
        text of the first marker, or the place up to which the text certainly has no marker, and
        None. is_end: nothing follows that can still become a marker."""
        limit = len(text) if limit is None else limit
        match = self._pattern.search(text, start, limit)
        place = limit if match is None else match.start()
        if not is_end:
            for maybe in range(max(start, len(text) - self._reach), min(place + 1, len(text))):
                # this marker, or a longer one, may still be completed
                if text[maybe:] in self._prefixes:
                    return maybe, None
        return place, None if match is None else match.group()


class Stops(Markers):
    """Markers that end a value even where it could contain them, because the model has forgotten
    the value's own end.

    always: control tokens, which a value cannot contain. before: marker → the texts of which one
    must come after it, with or without white space between, or the text must end there. Without
    that, the marker is part of the value: a string may quote it. named: markers of `before` that
    have a name between them and that text.
    """

    __slots__ = ("before", "named")

    def __init__(
        self,
        *always: str,
        before: Mapping[str, tuple[str, ...]] | None = None,
        named: Collection[str] = (),
    ) -> None:
        self.before = dict(before or {})
        self.named = frozenset(named)
        super().__init__(*dict.fromkeys([*always, *self.before]))


class MarkerScanner:
    """Cuts a stream of text into plain pieces and markers. Text that may still become a marker is
    held back. markers: the texts to look for. They may be changed between calls, because a parser
    inside a call waits only for its end. If several begin at one place, the longest wins. Time is
    linear in the text.
    """

    def __init__(self, markers: Collection[str]) -> None:
        self._held = ""
        self.markers = tuple(markers)

    @property
    def markers(self) -> tuple[str, ...]:
        return self._markers.texts

    @markers.setter
    def markers(self, texts: Collection[str]) -> None:
        self._markers = Markers(*texts)

    def scan(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the (piece, is_marker) pairs that are certain, in order. The caller must consume
        all of them before the next call."""
        text = self._held + text
        self._held = ""
        start = 0
        while start < len(text):
            place, marker = self._markers.find(text, start, False)
            if place > start:
                yield text[start:place], False
            if marker is None:
                self._held = text[place:]
                return
            yield marker, True
            start = place + len(marker)

    def flush(self) -> str:
        """End the text. Text that was held back is plain text."""
        held = self._held
        self._held = ""
        return held
