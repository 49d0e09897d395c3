"""Makes parsers of Pegboard from classes in vLLM's form.

An answer that is not streamed is parsed by vLLM's method for whole answers. In a stream, each chunk
goes through the method for streams. When the stream ends, the method for whole answers reads
everything again. If its result begins with what was sent, the rest is sent as well. If it does not,
what was sent stands, and a warning says so once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from pegboard.interfaces.output_parser import (
    Content,
    Event,
    OutputParserSetup,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from pegboard.interfaces.structured_output import Constraint
from pegboard.interfaces.tokenizer import Tokenizer, Vocabulary
from pegboard.log import get_logger
from pegboard_vllm_compat.parser_interface import ReasoningParsers, ToolParsers
from pegboard_vllm_compat.parser_stream import DeltaReader
from pegboard_vllm_compat.protocol import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
    random_tool_call_id,
)
from pegboard_vllm_compat.targets import provide

log = get_logger(__name__)


class Tokens(dict[str, int]):
    """Text of a token → its id. Every text that is asked for has an id, perhaps a new one: parsers
    refuse to start if their markers have none."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the id of a text, or a new one."""
        return self.setdefault(key, len(self))

    def __missing__(self, key: str) -> int:
        return self.setdefault(key, len(self))


class ParserTokenizer:
    """What vLLM's parsers can ask of the tokenizer. tokenizer: None if only the vocabulary is
    known."""

    _last: ClassVar[tuple[Vocabulary, Tokenizer | None, Tokens] | None] = None

    def __init__(self, vocabulary: Vocabulary, tokenizer: Tokenizer | None = None) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer

    def get_vocab(self) -> dict[str, int]:
        """Return text → id of every token."""
        last = ParserTokenizer._last
        if last is None or last[0] is not self._vocabulary or last[1] is not self._tokenizer:
            last = (self._vocabulary, self._tokenizer, self._tokens())
            ParserTokenizer._last = last
        return last[2]

    def _tokens(self) -> Tokens:
        tokens = Tokens()
        for place, value in enumerate(self._vocabulary.token_bytes):
            if value:
                tokens.setdefault(value.decode("utf-8", "replace"), place)
                continue
            text = self.decode([place]) if self._tokenizer else ""
            tokens.setdefault(text or f"<special {place}>", place)
        return tokens

    def encode(self, text: str, add_special_tokens: bool = True, **more: Any) -> list[int]:
        """Return the ids of a text. Raises ValueError if only the vocabulary is known."""
        return self._known().encode(text, add_special_tokens=add_special_tokens)

    def decode(
        self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **more: Any
    ) -> str:
        """Return the text of ids. Raises ValueError if only the vocabulary is known."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._known().decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or those of a list."""
        vocabulary = self.get_vocab()
        if isinstance(tokens, str):
            return vocabulary.get(tokens)
        return [vocabulary.get(token) for token in tokens]

    def _known(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("the tokenizer is not known here")
        return self._tokenizer


class _Adapter(ABC):
    """Reads one answer. target: what registers the parser `name`."""

    target: ClassVar[str]
    name: ClassVar[str]
    shadow: ClassVar[bool] = False
    table: ClassVar[Any]

    def __init__(self, options: None, setup: OutputParserSetup) -> None:
        self._setup = setup
        self._text = ""
        self._ids: list[int] = []
        self._new_ids: list[int] = []
        self._reader = DeltaReader()
        self._streams = setup.is_streamed
        self._parser: Any = None
        self._request = ChatCompletionRequest(
            tools=[ChatCompletionToolsParam(**tool) for tool in setup.tools] or None,
            chat_template_kwargs=dict(setup.template_kwargs),
            stream=setup.is_streamed,
        )

    def _make(self) -> Any:
        """Return a new parser of vLLM's form."""
        provide(self.target, shadow=self.shadow)
        tokenizer = ParserTokenizer(self._setup.vocabulary, self._setup.tokenizer)
        return self.table.parser(self.name)(tokenizer)

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """See `OutputParser.feed`. Ids without text wait for the text that they become."""
        before = self._text
        self._text += text
        self._new_ids += token_ids
        if not text or not self._streams:
            return []
        try:
            return self._reader.read(self._delta(before, text))
        except Exception as error:  # noqa: BLE001
            # the parser is somebody else's; the method for whole answers may still work
            self._warn(f"failed in a stream, the rest comes at the end: {error!r}")
            self._streams = False
            return []

    def _delta(self, before: str, text: str) -> Any:
        """Return the parser's DeltaMessage for new text."""
        if self._parser is None:
            self._parser = self._make()
            self._begin()
        new = self._new_ids
        if not new and self._setup.tokenizer is not None:
            # a parser after another one gets text only
            new = self._setup.tokenizer.encode(text, add_special_tokens=False)
        earlier = list(self._ids)
        self._ids += new
        self._new_ids = []
        return self._streamed((before, self._text, text, earlier, list(self._ids), list(new)))

    def finish(self) -> list[Event]:
        """See `OutputParser.finish`. An answer whose parser fails is content."""
        try:
            whole = self._events()
        except Exception as error:  # noqa: BLE001
            # the parser is somebody else's, and an answer is not lost because of it
            self._warn(f"failed, the answer is content: {error!r}")
            whole = [Content(self._text)] if self._text else []
        if not self._setup.is_streamed:
            return whole
        rest = self._reader.rest(whole)
        if rest is None:
            self._warn("says something else in streams than of whole answers")
        return self._reader.end() if rest is None else [*rest, *self._reader.end()]

    def _warn(self, message: str) -> None:
        _warn_once(f"{self.target} {self.name} {message}")

    def _begin(self) -> None:
        """Prepare the request for the parser of a stream."""

    @abstractmethod
    def _streamed(self, pieces: tuple[str, str, str, list[int], list[int], list[int]]) -> Any:
        """Return the DeltaMessage, or None. pieces: the previous, current and new text, and the
        same as ids."""

    @abstractmethod
    def _events(self) -> list[Event]:
        """Return the events of the whole text."""

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        """See `OutputParser.constraint`. vLLM's parsers have no grammar."""
        return None

    def reasoning_end(self) -> tuple[str, ...]:
        """See `OutputParser.reasoning_end`."""
        return ()

    def call_id(self, index: int, name: str) -> str:
        """See `OutputParser.call_id`."""
        return random_tool_call_id()


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


class VllmToolParser(_Adapter):
    """Implements `pegboard.interfaces.output_parser.OutputParser`."""

    table = ToolParsers

    def _begin(self) -> None:
        self._request = self._parser.adjust_request(self._request)

    def _streamed(self, pieces: tuple[str, str, str, list[int], list[int], list[int]]) -> Any:
        return self._parser.extract_tool_calls_streaming(*pieces, self._request)

    def _events(self) -> list[Event]:
        parser = self._make()
        result = parser.extract_tool_calls(self._text, parser.adjust_request(self._request))
        events: list[Event] = [Content(result.content)] if result.content else []
        if not result.tools_called:
            return events or ([Content(self._text)] if self._text else [])
        for index, call in enumerate(result.tool_calls):
            events += [
                ToolCallStart(index, call.id, call.function.name),
                ToolCallArguments(index, call.function.arguments),
                ToolCallEnd(index),
            ]
        return events


class VllmReasoningParser(_Adapter):
    """Implements `pegboard.interfaces.output_parser.OutputParser`."""

    table = ReasoningParsers

    def _streamed(self, pieces: tuple[str, str, str, list[int], list[int], list[int]]) -> Any:
        parser = self._parser
        return _either(
            parser, "extract_reasoning_streaming", "extract_reasoning_content_streaming"
        )(*pieces)

    def _events(self) -> list[Event]:
        parser = self._make()
        method = _either(parser, "extract_reasoning", "extract_reasoning_content")
        reasoning, content = method(self._text, self._request)
        events: list[Event] = [Reasoning(reasoning)] if reasoning else []
        return events + ([Content(content)] if content else [])

    def reasoning_end(self) -> tuple[str, ...]:
        """See `OutputParser.reasoning_end`. Parsers with an attribute `end_token` tell it."""
        end = getattr(self._make(), "end_token", None)
        return (end,) if isinstance(end, str) and end else ()


def _either(parser: Any, name: str, older: str) -> Any:
    """Return a method of a parser, under its older name if the class has that one. The class from
    which parsers derive has the new name without a body."""
    is_older = getattr(type(parser), older, None) is not None
    return getattr(parser, older if is_older else name)
