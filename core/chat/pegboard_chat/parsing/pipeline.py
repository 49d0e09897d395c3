"""A reasoning parser followed by a tool parser, combined into one parser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pegboard.errors import blame
from pegboard.interfaces.output_parser import Content, Event, OutputParser


class Pipeline:
    """The parsers of one completion. Each may be None; without parsers, all text is content. The tool parser reads the content
    that the reasoning parser passes on. If a parser raises, the error becomes a PluginFailure with its name, and only that
    request fails.
    """

    def __init__(self, reasoning: OutputParser | None = None, tools: OutputParser | None = None) -> None:
        self._parsers = [parser for parser in (reasoning, tools) if parser is not None]

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """Return the events that are certain after `text`. token_ids: the ids of `text`, for parsers that can use them."""
        events: Iterable[Event] = [Content(text)] if text or token_ids else []
        for position, parser in enumerate(self._parsers):
            events = list(self._through(parser, events, token_ids if position == 0 else ()))
        return [event for event in events if not (isinstance(event, Content) and not event.text)]

    def finish(self) -> list[Event]:
        """End the completion. Text that a parser held back passes through the parsers after it."""
        events: list[Event] = []
        for parser in self._parsers:
            events = list(self._through(parser, events, ()))
            with blame(type(parser).__name__):
                events += parser.finish()
        return events

    @staticmethod
    def _through(parser: OutputParser, events: Iterable[Event], token_ids: Sequence[int]) -> Iterator[Event]:
        """Feed content to the parser. All other events pass unchanged."""
        for event in events:
            if isinstance(event, Content):
                with blame(type(parser).__name__):
                    parsed = parser.feed(event.text, token_ids)
                yield from parsed
            else:
                yield event
