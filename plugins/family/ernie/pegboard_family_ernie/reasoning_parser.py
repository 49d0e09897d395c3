"""Reasoning and response of ERNIE 4.5 Thinking.

    <think>
    Let me see.
    </think>

    <response>
    Hello.
    </response>

Format: the chat template in https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Thinking, which opens
the reasoning in the prompt. The tags of the response are markup; text outside them (tool calls) is
also content.
"""

from __future__ import annotations

from pegboard.interfaces.output_parser import Content
from pegboard_chat.parsing import Markers, Steps, TaggedReasoning

RESPONSE = "<response>"
RESPONSE_ENDS = Markers("\n</response>", "</response>")


class Ernie45ReasoningParser(TaggedReasoning):
    start = "<think>"
    end = "</think>"
    begins_inside = True

    def answer(self, *ends: str) -> Steps[None]:
        blank = yield from self.text.space()
        if (yield from self.text.accept(RESPONSE)):
            yield from self.text.accept("\n")
            yield from self.text.pieces(RESPONSE_ENDS, Content)
        elif blank:
            yield Content(blank)
        yield from super().answer(*RESPONSE_ENDS.texts)
