"""Reasoning between two markers, as most models write it."""

from __future__ import annotations

from typing import ClassVar

from pegboard.interfaces.output_parser import Content, OutputParserSetup, Reasoning
from pegboard_chat.parsing.markers import Markers
from pegboard_chat.parsing.reader import Steps
from pegboard_chat.parsing.stream_parser import StreamParser


class TaggedReasoning(StreamParser):
    """Reads reasoning from `start` to `end`. A subclass sets the markers, and overrides `begins` if
    it depends on the request.

    start: "" if the model never writes a start marker. begins_inside: the output begins inside the
    reasoning unless the prompt shows otherwise, because the template wrote the start marker or the
    model leaves it out. A prompt that ends with the start or end marker decides this. stops: texts
    that also end the reasoning and belong to the content, for models that forget the end marker.
    The markers are dropped, and all other text is unchanged. After the first reasoning, everything
    is content, except an end marker without a start marker, which is dropped unless it is quoted.
    If the request switches the reasoning off, all text is content, with its markers.
    """

    start: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    begins_inside: ClassVar[bool] = False
    stops: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: object = None, setup: OutputParserSetup | None = None) -> None:
        super().__init__(options, setup)
        self.is_inside = self._begins()

    def begins(self) -> bool:
        """Return whether the output begins inside the reasoning, if the prompt does not show it."""
        return self.begins_inside

    def may_open(self) -> bool:
        """Return whether the model may start the reasoning itself, if the prompt has not ended
        it."""
        return True

    def reasoning_end(self) -> tuple[str, ...]:
        return (self.end, *self.stops) if self.is_inside or self._may_open() else ()

    def read(self) -> Steps[None]:
        # switched off: all text is content, unchanged
        if not self.is_inside and not self.may_open():
            return
        yield from self.reasoning()
        yield from self.answer()

    def reasoning(self) -> Steps[None]:
        """Read the reasoning, if the output begins with it."""
        if not self.is_inside:
            if not self._may_open():
                return
            blank = yield from self.text.space()
            if not (yield from self.text.accept(self.start)):
                if blank:
                    yield Content(blank)
                return
        elif self.start:  # the model has repeated the marker
            blank = yield from self.text.space()
            if not (yield from self.text.accept(self.start)) and blank:
                yield Reasoning(blank)
        marker = yield from self.text.pieces(Markers(self.end, *self.stops), Reasoning)
        if marker in self.stops:
            yield Content(marker)

    def answer(self, *ends: str) -> Steps[None]:
        """Stream the text after the reasoning as content. ends: other markers that are dropped."""
        num_open = 0
        markers = Markers(*filter(None, (self.start, self.end, *ends)))
        while marker := (yield from self.text.pieces(markers, Content)):
            num_open += 1 if marker == self.start else -1
            if num_open >= 0 or self.text.is_quoted(marker):
                yield Content(marker)
            num_open = max(num_open, 0)

    def _begins(self) -> bool:
        prompt = self.setup.prompt_end.rstrip() if self.setup else ""
        if self.start and prompt.endswith(self.start):
            return True
        return not prompt.endswith(self.end) and self.begins()

    def _may_open(self) -> bool:
        prompt = self.setup.prompt_end.rstrip() if self.setup else ""
        return bool(self.start) and not prompt.endswith(self.end) and self.may_open()


class SwitchedReasoning(TaggedReasoning):
    """Reasoning that a request switches on or off with any of the template's `switches`. Without
    one, `begins_inside` decides."""

    begins_inside = True
    switches: ClassVar[tuple[str, ...]] = ("thinking", "enable_thinking")

    def begins(self) -> bool:
        kwargs = self.setup.template_kwargs if self.setup else {}
        given = [kwargs[name] for name in self.switches if kwargs.get(name) is not None]
        return any(given) if given else self.begins_inside

    def may_open(self) -> bool:
        return self.begins()
