"""Finding markers such as `<think>` in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterator


class MarkerScanner:
    """Cuts a stream of text into plain pieces and markers. What may still become a marker is held back.

    markers: the texts looked for; may be changed between calls (a parser that is inside a call waits for its end only). Where
    several begin at one place the longest wins. Time is linear in the text, times the longest marker.
    """

    def __init__(self, markers: Collection[str]) -> None:
        self.markers = tuple(markers)
        self._held = ""

    def scan(self, text: str) -> Iterator[tuple[str, bool]]:
        """(piece, is_marker) pairs in order, as far as they are certain. Consume all before the next call."""
        self._held += text
        while self._held:
            start, marker = self._first()
            if marker is None:
                if start:
                    piece, self._held = self._held[:start], self._held[start:]
                    yield piece, False
                return
            if start:
                piece, self._held = self._held[:start], self._held[start:]
                yield piece, False
            self._held = self._held[len(marker) :]
            yield marker, True

    def flush(self) -> str:
        """The end has come: what was held back is plain text."""
        held, self._held = self._held, ""
        return held

    def _first(self) -> tuple[int, str | None]:
        """Where the first certain marker begins, and it; or where a possible one begins (the length when there is none)."""
        text = self._held
        for start in range(len(text)):
            whole = [marker for marker in self.markers if text.startswith(marker, start)]
            longer = [marker for marker in self.markers if len(marker) > len(text) - start and marker.startswith(text[start:])]
            if longer:
                return start, None  # this, or a longer marker than the ones that fit, may be coming
            if whole:
                return start, max(whole, key=len)
        return len(text), None
