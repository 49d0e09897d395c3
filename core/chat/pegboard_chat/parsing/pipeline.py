"""A reasoning parser followed by a tool parser, combined into one parser."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from pegboard.errors import blame
from pegboard.interfaces.output_parser import Content, Event, OutputParser


class Pipeline:
    """The parsers of one completion. Each may be None; without parsers, all text is content. The
    tool parser reads the content that the reasoning parser passes on. plugins: their ids. If a
    parser raises or does not return events, the error becomes a PluginFailure with its id, and only
    that request fails.
    """

    def __init__(
        self,
        reasoning: OutputParser | None = None,
        tools: OutputParser | None = None,
        plugins: Sequence[str] = ("", ""),
    ) -> None:
        named = zip((reasoning, tools), plugins, strict=True)
        self._parsers = [
            (parser, plugin or type(parser).__name__)
            for parser, plugin in named
            if parser is not None
        ]

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """Return the events that are certain after `text`. token_ids: the ids of `text`, for
        parsers that can use them."""
        events: Iterable[Event] = [Content(text)] if text or token_ids else []
        for position, (parser, plugin) in enumerate(self._parsers):
            events = list(self._through(parser, plugin, events, token_ids if position == 0 else ()))
        return [event for event in events if not (isinstance(event, Content) and not event.text)]

    def finish(self) -> list[Event]:
        """End the completion. Text that a parser held back passes through the parsers after it."""
        events: list[Event] = []
        for parser, plugin in self._parsers:
            events = [*self._through(parser, plugin, events, ()), *_events(plugin, parser.finish)]
        return events

    @staticmethod
    def _through(
        parser: OutputParser, plugin: str, events: Iterable[Event], token_ids: Sequence[int]
    ) -> Iterator[Event]:
        """Feed content to the parser. All other events pass unchanged."""
        for event in events:
            if isinstance(event, Content):
                yield from _events(plugin, parser.feed, event.text, token_ids)
            else:
                yield event


def _events(plugin: str, method: Callable[..., list[Event]], *arguments: object) -> list[Event]:
    """Call a method of a parser that returns events. Raises PluginFailure if it raises or returns
    anything else."""
    with blame(plugin):
        events = method(*arguments)
        if not isinstance(events, list) or not all(isinstance(event, Event) for event in events):
            raise TypeError(
                f"{method.__name__}() returned {events!r:.100}, expected a list of events"
            )
    return events
