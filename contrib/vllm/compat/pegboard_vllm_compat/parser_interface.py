"""The classes from which vLLM's parsers derive, and the tables where their files register
them, which vLLM calls managers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

from pegboard_vllm_compat.protocol import DeltaMessage


class ParserNames:
    """Parsers by name. Files of vLLM write `@ToolParserManager.register_module("name")`."""

    parsers: ClassVar[dict[str, Any]]

    @classmethod
    def register_module(
        cls, name: str | list[str] | None = None, force: bool = True, module: Any = None
    ) -> Any:
        """Register a class under one name or several; without `module`, as a decorator."""

        def register(parser: type) -> type:
            names = [name] if isinstance(name, str) else name or [parser.__name__]
            cls.parsers.update(dict.fromkeys(names, parser))
            return parser

        return register if module is None else register(module)

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a class that is imported when it is needed."""
        cls.parsers[name] = lambda: getattr(import_module(module_path), class_name)

    @classmethod
    def parser(cls, name: str) -> Any:
        """Return the class of a name. Raises KeyError."""
        value = cls.parsers[name]
        return value if isinstance(value, type) else value()


class ToolParsers(ParserNames):
    """The tool parsers of this process."""

    parsers: ClassVar[dict[str, Any]] = {}

    @classmethod
    def get_tool_parser(cls, name: str) -> Any:
        """Return the class of a name. Raises KeyError."""
        return cls.parser(name)


class ReasoningParsers(ParserNames):
    """The reasoning parsers of this process."""

    parsers: ClassVar[dict[str, Any]] = {}

    @classmethod
    def get_reasoning_parser(cls, name: str) -> Any:
        """Return the class of a name. Raises KeyError."""
        return cls.parser(name)


class ToolParser:
    """Finds calls in an answer."""

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        self.model_tokenizer = tokenizer
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []

    @property
    def vocab(self) -> dict[str, int]:
        """Text of a token → its id."""
        vocabulary: dict[str, int] = self.model_tokenizer.get_vocab()
        return vocabulary

    def adjust_request(self, request: Any) -> Any:
        """Return the request, perhaps changed."""
        return request

    @abstractmethod
    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Return the ExtractedToolCallInformation of a whole answer."""

    @abstractmethod
    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        """Return the DeltaMessage of new text, or None."""


class ReasoningParser:
    """Divides an answer into reasoning and content."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        self.model_tokenizer = tokenizer

    @property
    def vocab(self) -> dict[str, int]:
        """Text of a token → its id."""
        vocabulary: dict[str, int] = self.model_tokenizer.get_vocab()
        return vocabulary

    @abstractmethod
    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return whether the reasoning has ended."""

    @abstractmethod
    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Return the ids after the reasoning."""

    @abstractmethod
    def extract_reasoning(self, model_output: str, request: Any) -> tuple[Any, Any]:
        """Return the reasoning and the content of a whole answer; each may be None."""

    @abstractmethod
    def extract_reasoning_streaming(self, *texts_and_ids: Any) -> Any:
        """Return the DeltaMessage of new text, or None."""


class BaseThinkingReasoningParser(ReasoningParser):
    """Reasoning that ends with a token. A subclass says `start_token` and `end_token`."""

    start_token: str
    end_token: str

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self.start_token_id = self.vocab.get(self.start_token)
        self.end_token_id = self.vocab.get(self.end_token)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """See `ReasoningParser.is_reasoning_end`."""
        return self.end_token_id in input_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """See `ReasoningParser.extract_content_ids`."""
        if self.end_token_id not in input_ids:
            return []
        return input_ids[input_ids.index(self.end_token_id) + 1 :]

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[Any, Any]:
        """See `ReasoningParser.extract_reasoning`."""
        text = model_output.removeprefix(self.start_token)
        reasoning, end, content = text.partition(self.end_token)
        return reasoning or None, (content or None) if end else None

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, *delta_and_ids: Any
    ) -> Any:
        """See `ReasoningParser.extract_reasoning_streaming`. Text that may become one of the tokens
        is held back."""
        before = self._certain(previous_text)
        after = self._certain(current_text)
        news = [new[len(old) :] or None for old, new in zip(before, after, strict=True)]
        return DeltaMessage(reasoning=news[0], content=news[1]) if any(news) else None

    def _certain(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that a beginning of an answer has for certain."""
        if self.start_token.startswith(text):
            return "", ""
        reasoning, end, content = text.removeprefix(self.start_token).partition(self.end_token)
        if end:
            return reasoning, content
        lengths = range(min(len(reasoning), len(self.end_token) - 1), 0, -1)
        size = next((n for n in lengths if reasoning.endswith(self.end_token[:n])), 0)
        return reasoning[: len(reasoning) - size], ""
