"""Reasoning of Magistral and later: `[THINK]…[/THINK]`
(https://docs.mistral.ai/capabilities/reasoning). A call also ends it.

There may be text before it, which is content. Magistral-2506 writes `<think>…</think>` at the
beginning of the output.
"""

from __future__ import annotations

from pegboard.interfaces.output_parser import Content, Reasoning
from pegboard_chat.parsing import Markers, Steps, TaggedReasoning

START = "[THINK]"
END = "[/THINK]"
CALLS = "[TOOL_CALLS]"
OLD_START = "<think>"
OLD_END = "</think>"
BEFORE = Markers(START, END, CALLS)


class MistralReasoningParser(TaggedReasoning):
    start = START
    end = END
    stops = (CALLS,)

    def reasoning_end(self) -> tuple[str, ...]:
        ends = super().reasoning_end()
        return (*ends, OLD_END) if ends else ()

    def reasoning(self) -> Steps[None]:
        if self.is_inside:
            yield from super().reasoning()
            return
        blank = yield from self.text.space()
        if (yield from self.text.accept(OLD_START)):
            yield from self._until(OLD_END)
            return
        if blank and (yield from self.text.ahead(len(START))) != START:
            yield Content(blank)
        # an end without a start is dropped
        while (marker := (yield from self.text.pieces(BEFORE, Content))) == END:
            pass
        if marker == START:
            yield from self._until(END)
        elif marker:
            yield Content(marker)

    def _until(self, end: str) -> Steps[None]:
        if (yield from self.text.pieces(Markers(end, CALLS), Reasoning)) == CALLS:
            yield Content(CALLS)
