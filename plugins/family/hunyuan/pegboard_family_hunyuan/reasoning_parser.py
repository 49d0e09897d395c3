"""Reasoning and answer of Hunyuan-A13B.

    <think>
    Let me see.
    </think>
    <answer>
    Hello.
    </answer>

https://huggingface.co/tencent/Hunyuan-A13B-Instruct: with `enable_thinking` off the template closes
the reasoning in the prompt. The tags of the answer are markup; text outside them is also content.
"""

from __future__ import annotations

from pegboard.interfaces.output_parser import Content
from pegboard_chat.parsing import Markers, Steps, TaggedReasoning

ANSWER = "<answer>"
ANSWER_ENDS = Markers("\n</answer>", "</answer>")


class HunyuanReasoningParser(TaggedReasoning):
    start = "<think>"
    end = "</think>"

    def answer(self, *ends: str) -> Steps[None]:
        blank = yield from self.text.space()
        if (yield from self.text.accept(ANSWER)):
            yield from self.text.accept("\n")
            yield from self.text.pieces(ANSWER_ENDS, Content)
        elif blank:
            yield Content(blank)
        yield from super().answer(*ANSWER_ENDS.texts)
