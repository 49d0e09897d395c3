"""Makes parsers of Pegboard from classes in vLLM's form. An answer is parsed as a whole when it
ends, with vLLM's methods for whole answers, so it is the same in a stream and without one; a stream
gets it in one piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard.log import get_logger
from pegboard_vllm_compat.parser_interface import ReasoningParsers, ToolParsers
from pegboard_vllm_compat.protocol import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
    random_tool_call_id,
)
from pegboard_vllm_compat.targets import provide

log = get_logger(__name__)


class Tokens(dict[str, int]):
    """Text of a token → its id. The texts of special tokens are not known here, so every text that
    is asked for has an id: parsers refuse to start if their markers have none."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the id of a text, or a new one."""
        return self.setdefault(key, len(self))

    def __missing__(self, key: str) -> int:
        return self.setdefault(key, len(self))


class VocabularyTokenizer:
    """What vLLM's parsers can ask of the tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: Tokens | None = None

    def get_vocab(self) -> dict[str, int]:
        """Return text → id of every token."""
        if self._tokens is None:
            self._tokens = Tokens()
            for place, value in enumerate(self._vocabulary.token_bytes):
                text = value.decode("utf-8", "replace") if value else f"<special {place}>"
                self._tokens.setdefault(text, place)
        return self._tokens


class _Whole(ABC):
    """Keeps an answer until it ends. target: what registers the parser `name`."""

    target: ClassVar[str]
    name: ClassVar[str]
    shadow: ClassVar[bool] = False

    def __init__(self, options: None, setup: OutputParserSetup) -> None:
        self._setup = setup
        self._text = ""
        self._parser: Any = None

    def _make(self, table: Any) -> Any:
        """Return a new parser of vLLM's form."""
        provide(self.target, shadow=self.shadow)
        return table.parser(self.name)(VocabularyTokenizer(self._setup.vocabulary))

    def _request(self) -> ChatCompletionRequest:
        tools = [ChatCompletionToolsParam(**tool) for tool in self._setup.tools]
        return ChatCompletionRequest(
            tools=tools or None, chat_template_kwargs=dict(self._setup.template_kwargs)
        )

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """See `OutputParser.feed`."""
        self._text += text
        return []

    def finish(self) -> list[Event]:
        """See `OutputParser.finish`. An answer whose parser fails is content."""
        try:
            return self._events()
        except Exception as error:  # noqa: BLE001
            # the parser is somebody else's, and an answer is not lost because of it
            log.warning("%s %s failed: %r; the answer is content", self.target, self.name, error)
            return [Content(self._text)] if self._text else []

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


class VllmToolParser(_Whole):
    """Implements `pegboard.interfaces.output_parser.OutputParser`."""

    def _events(self) -> list[Event]:
        parser = self._make(ToolParsers)
        result = parser.extract_tool_calls(self._text, parser.adjust_request(self._request()))
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


class VllmReasoningParser(_Whole):
    """Implements `pegboard.interfaces.output_parser.OutputParser`."""

    def _events(self) -> list[Event]:
        parser = self._make(ReasoningParsers)
        method = getattr(parser, "extract_reasoning", None) or parser.extract_reasoning_content
        reasoning, content = method(self._text, self._request())
        events: list[Event] = [Reasoning(reasoning)] if reasoning else []
        return events + ([Content(content)] if content else [])

    def reasoning_end(self) -> tuple[str, ...]:
        """See `OutputParser.reasoning_end`. Parsers with an attribute `end_token` tell it."""
        end = getattr(self._make(ReasoningParsers), "end_token", None)
        return (end,) if isinstance(end, str) and end else ()
