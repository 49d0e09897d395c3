"""Reasoning of IBM Granite 3.2 and 3.3: between two English sentences, when `thinking` is set for
the template.

    Here is my thought process: … Here is my response: …

Format: https://huggingface.co/ibm-granite/granite-3.2-8b-instruct. Quantized models write "Here's"
for "Here is".
"""

from __future__ import annotations

from pegboard.interfaces.output_parser import Content, Reasoning
from pegboard_chat.parsing import Markers, Steps, StreamParser

STARTS = ("Here is my thought process:", "Here's my thought process:")
ENDS = ("Here is my response:", "Here's my response:")
END = Markers(*ENDS)


class GraniteReasoningParser(StreamParser):
    def read(self) -> Steps[None]:
        blank = yield from self.text.space()
        if (yield from self.text.accept(*STARTS)):
            yield from self.text.pieces(END, Reasoning)
        elif blank:
            yield Content(blank)

    def reasoning_end(self) -> tuple[str, ...]:
        return ENDS if self.setup is not None and self.setup.template_kwargs.get("thinking") else ()
