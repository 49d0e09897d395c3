"""Output of gpt-oss: messages on channels, the harmony format.

    <|channel|>analysis<|message|>Let me see.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather
    <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>Hello.<|return|>

(without line breaks). Format: https://cookbook.openai.com/articles/openai-harmony. The prompt ends
with `<|start|>assistant`, so the output begins after it. Messages on `analysis` are reasoning,
those with a recipient are calls, and all others are content. The recipient may precede the channel.
The tokens that stop the generation (`<|call|>`, `<|return|>`) may be missing in the text.

    <|channel|>analysis to=python code<|message|>print(6 * 7)<|call|>

An empty body means no arguments. A body that is not JSON is the argument of a function whose only
parameter (or only required parameter) is a string, and otherwise the argument `input`. A message to
`assistant` or another participant is content.

The control tokens never become content: a token in the wrong place, or a header that is broken off,
is dropped, and its text is content. Messages of content that follow one another are separated by a
line break.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import ClassVar

from pegboard.interfaces.output_parser import Content, Event, Reasoning
from pegboard_chat.parsing import Markers, Steps, Stops, StreamParser, read_arguments

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
HEADERS = Markers(START, CHANNEL)
BODY_ENDS = Markers(START, CHANNEL, *ENDS)
WORDS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
TOKENS = Stops(*WORDS)
HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?:\s*to=(?P<before>[\w.-]+))?"
    r"<\|channel\|>(?P<channel>analysis|commentary|final)(?:\s*to=(?P<behind>[\w.-]+))?\s*(?:(?:<\|constrain\|>)?\s*(?:json|code))?\s*"
)
RECIPIENT = re.compile(r"to=([\w.-]+)")
TOKEN = re.compile(r"<\|(?:start|channel|constrain)\|>")
EARLY = " to="
PARTICIPANTS = frozenset({"assistant", "user", "system", "developer", "all"})
ANY_TEXT = "input"
"""The argument for text that is not JSON, if the function does not show which parameter it is
for."""


class HarmonyToolParser(StreamParser):
    ends = (MESSAGE, CONSTRAIN, *ENDS)
    thoughts: ClassVar[Mapping[str, str]] = {}
    reads_calls: ClassVar[bool] = True
    _last = ""
    # the last character of the content so far; whether the next begins another message
    _is_apart = False

    def read(self) -> Steps[None]:
        marker = ""
        if (yield from self.text.ahead(len(EARLY))) == EARLY:
            self.text.keep()
            marker = yield from self._message("")
        while marker or (marker := (yield from self.prose(HEADERS))):
            marker = yield from self._message(marker)

    def _message(self, marker: str) -> Steps[str]:
        """Read a message whose header begins with `marker` (consumed and kept). Usually returns "".
        If the marker of the next message stands instead of an end token, returns that marker,
        which is also kept."""
        header, end = yield from self._header(marker)
        match = HEADER.fullmatch(header) if end == MESSAGE else None
        recipient = (match and (match["before"] or match["behind"])) or ""
        if end == MESSAGE and match is None and (named := RECIPIENT.search(header)):
            recipient = named[1]
        if recipient in PARTICIPANTS or recipient == "functions.":  # a call of no function
            recipient = ""
        if recipient and not self.reads_calls:
            return (yield from self._unread())
        self.text.forget()
        if match is None and (words := TOKEN.sub("", header.removeprefix(f"{START}assistant"))):
            yield self._content(words)
        if end != MESSAGE:
            return self._next(end)
        if recipient and self.reads_calls:
            return (yield from self._call(recipient.removeprefix("functions.")))
        if match is not None and match["channel"] == "analysis" and not recipient:
            return (yield from self._body(Reasoning))
        self._is_apart = True
        return (yield from self._body(self._content))

    def _header(self, marker: str) -> Steps[tuple[str, str]]:
        """Read a header that begins with `marker`. Returns it without tokens that are repeated, and
        the token that ends it."""
        header = marker
        last = marker
        while True:
            part, token = yield from self.text.until(TOKENS)
            header += part
            if token != CONSTRAIN and not (
                token == CHANNEL and (CHANNEL not in header or not part)
            ):
                return header, token
            if part or token != last:
                header += token
            last = token

    def _content(self, text: str) -> Event:
        """Content, after a line break if it begins another message."""
        is_apart = self._is_apart and bool(self._last.strip()) and bool(text[:1].strip())
        self._is_apart = False
        self._last = text[-1]
        return Content("\n" + text if is_apart else text)

    def _unread(self) -> Steps[str]:
        """Pass on a call as it is written, with an end token."""
        yield from self.text.give_back()
        marker = yield from self.text.pieces(BODY_ENDS, Content)
        if not marker:
            return ""
        yield Content(marker if marker in ENDS else ENDS[-1])
        return self._next(marker)

    def _body(self, wrap: Callable[[str], Event]) -> Steps[str]:
        """Stream the body of a message. Tokens that have no meaning there are dropped."""
        while (token := (yield from self.text.pieces(TOKENS, wrap))) in (MESSAGE, CONSTRAIN):
            pass
        return self._next(token)

    def _next(self, token: str) -> str:
        if token not in (START, CHANNEL):
            return ""
        self.text.keep(token)
        return token

    def _call(self, name: str) -> Steps[str]:
        """Read a message that is sent to a function. Returns the same as `_message`."""
        self.text.keep()
        yield from self.text.space()
        if (yield from self.text.stops(TOKENS)):  # no arguments
            self.text.forget()
            yield from self.calls.whole(name, "{}")
            return (yield from self._body(self._content))
        first = yield from self.text.peek()
        if first == "<":
            first = yield from self.text.ahead(max(map(len, WORDS)))
        if any(word.startswith(first) for word in WORDS):  # cut off, perhaps in a token
            self.text.take(len(first))
            self.text.forget()
            yield self.calls.start(name)
            yield self.calls.arguments("{}")
            self.calls.abandon()
            return ""
        count = self.calls.count
        if (yield from read_arguments(self.text, self.calls, name, stops=TOKENS)):
            self.text.forget()
            return (yield from self._body(self._content))
        rest = "".join(event.text for event in self.text.give_back() if isinstance(event, Content))
        if self.calls.count > count:  # the arguments break off
            self.calls.abandon()
            if rest.strip():
                yield self._content(rest)
            return (yield from self._body(self._content))
        yield self.calls.start(name)
        yield self.calls.arguments(
            f'{{{json.dumps(self._text_parameter(name), ensure_ascii=False)}: "{_escaped(rest)}'
        )
        token = yield from self._body(lambda text: self.calls.arguments(_escaped(text)))
        yield self.calls.arguments('"}')
        yield self.calls.end()
        return token

    def _text_parameter(self, name: str) -> str:
        """Returns the parameter for text that is not JSON."""
        schema = self.calls.parameters(name)
        properties = schema.get("properties")
        required = schema.get("required")
        if isinstance(properties, dict):
            for names in (list(properties), required if isinstance(required, list) else []):
                if (
                    len(names) == 1
                    and isinstance(property := properties.get(names[0]), dict)
                    and property.get("type") == "string"
                ):
                    return str(names[0])
        return ANY_TEXT


class HarmonyReasoningParser(HarmonyToolParser):
    """Leaves calls as they are written. The tool parser `openai` reads them afterwards. Without it,
    they are content."""

    reads_calls = False

    def reasoning_end(self) -> tuple[str, ...]:
        return (f"{CHANNEL}final{MESSAGE}",)


def _escaped(text: str) -> str:
    """Returns the text as it is written inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
