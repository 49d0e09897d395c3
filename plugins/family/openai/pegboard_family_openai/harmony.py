"""Output of gpt-oss: messages on channels, the harmony format.

    <|channel|>analysis<|message|>Let me see.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>Hello.<|return|>

(without line breaks). Format: https://cookbook.openai.com/articles/openai-harmony. The prompt ends with `<|start|>assistant`, so
the output begins after it. Messages on `analysis` are reasoning, those with a recipient are calls, and all others are content.
The recipient may precede the channel. The tokens that stop the generation (`<|call|>`, `<|return|>`) may be missing in the text.

    <|channel|>analysis to=python code<|message|>print(6 * 7)<|call|>

A body that is not JSON is the argument of a function whose only parameter is a string.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from pegboard.interfaces.output_parser import Content, Reasoning
from pegboard_chat.parsing import Markers, Steps, StreamParser, read_arguments

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
HEADERS, BODIES = Markers(START, CHANNEL), Markers(MESSAGE)
BODY_ENDS = Markers(START, CHANNEL, *ENDS)
HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?:\s*to=(?P<before>[\w.-]+))?"
    r"<\|channel\|>(?P<channel>analysis|commentary|final)(?:\s*to=(?P<behind>[\w.-]+))?\s*(?:(?:<\|constrain\|>)?\s*(?:json|code))?\s*"
)
MAX_HEADER = 512
EARLY = " to="


class HarmonyToolParser(StreamParser):
    reads_calls: ClassVar[bool] = True

    def read(self) -> Steps[None]:
        marker = ""
        if (yield from self.text.ahead(len(EARLY))) == EARLY:
            self.text.keep()
            marker = yield from self._message("")
        while marker or (marker := (yield from self.prose(HEADERS))):
            marker = yield from self._message(marker)

    def _message(self, marker: str) -> Steps[str]:
        """Read a message whose header begins with `marker` (consumed and kept). Usually returns "". If the marker of the next
        message stands in place of an end token, returns that marker, which is also kept."""
        header, end = yield from self.text.until(BODIES)
        found = HEADER.fullmatch(marker + header) if end and len(header) < MAX_HEADER else None
        recipient = found and (found["before"] or found["behind"])
        if found is None or (recipient and not self.reads_calls):
            yield from self.text.give_back()
            return ""
        if recipient:
            return (yield from self._body(recipient.removeprefix("functions.")))
        self.text.forget()
        wrap = Reasoning if found["channel"] == "analysis" else Content
        end = yield from self.text.pieces(BODY_ENDS, wrap)
        if not end or end in ENDS:
            return ""
        self.text.keep(end)
        return end

    def _body(self, name: str) -> Steps[str]:
        """Read a message that is sent to a function. Returns the same as `_message`."""
        parameter = self._only_text(name)
        space = yield from self.text.space()
        if parameter is None or (yield from self.text.peek()) in ("{", ""):
            yield from self.attempt(self._call(name))
            return ""
        self.text.forget()
        yield self.calls.start(name)
        yield self.calls.arguments(f'{{{json.dumps(parameter, ensure_ascii=False)}: "{_escaped(space)}')
        end = yield from self.text.pieces(BODY_ENDS, lambda text: self.calls.arguments(_escaped(text)))
        yield self.calls.arguments('"}')
        yield self.calls.end()
        if end in (START, CHANNEL):
            self.text.keep(end)
            return end
        return ""

    def _only_text(self, name: str) -> str | None:
        """Returns the only parameter of a function, if it has exactly one and it is a string."""
        properties = self.calls.parameters(name).get("properties")
        if not isinstance(properties, dict) or len(properties) != 1:
            return None
        ((parameter, schema),) = properties.items()
        return parameter if isinstance(schema, dict) and schema.get("type") == "string" else None

    def _call(self, name: str) -> Steps[bool]:
        if not name or not (yield from read_arguments(self.text, self.calls, name)):
            return False
        self.text.forget()
        yield from self.text.closing(*ENDS)
        return True


class HarmonyReasoningParser(HarmonyToolParser):
    """Leaves calls as they are written. The tool parser `openai` reads them afterwards."""

    reads_calls = False

    def reasoning_end(self) -> tuple[str, ...]:
        return (f"{CHANNEL}final{MESSAGE}",)


def _escaped(text: str) -> str:
    """Returns the text as it is written inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
