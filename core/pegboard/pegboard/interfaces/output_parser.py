"""Kinds `tool_parser` and `reasoning_parser` (provisional): from a completion's text to events.
Both have the same interface. Runs in A."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from pegboard.interfaces.structured_output import Constraint
    from pegboard.interfaces.tokenizer import Tokenizer, Vocabulary

PROMPT_END_TOKENS = 64
"""Number of tokens at the end of the prompt that a parser sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParserSpec(Spec):
    """flags: `special_tokens` = the parser's markers are special tokens of the model, so the text
    that it reads keeps them."""

    FLAGS = frozenset({"special_tokens"})


@dataclass(frozen=True, slots=True)
class OutputParserSetup:
    """vocabulary: for token-level markers. tools: the request's tools (OpenAI-shaped).
    template_kwargs: the request's switches for the chat template (`enable_thinking`, …).
    prompt_end: the end of the rendered prompt as text, including special tokens. It shows whether
    the template has already opened or closed the reasoning. tokenizer: that of `vocabulary`, for
    the ids of markers; None in tests that need none. is_streamed: the answer comes in many chunks,
    while the model writes. Otherwise there is one chunk, the whole answer."""

    vocabulary: "Vocabulary"
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_end: str = ""
    tokenizer: "Tokenizer | None" = None
    is_streamed: bool = False

    @classmethod
    def after_prompt(
        cls,
        tokenizer: "Tokenizer",
        prompt_token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> "OutputParserSetup":
        """Return the setup for the answer to this prompt."""
        end = tokenizer.decode(prompt_token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        return cls(tokenizer.vocabulary(), tuple(tools), template_kwargs or {}, end, tokenizer)


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    index: int


Event = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd


class OutputParser(Protocol):
    """Parses one completion. It never raises, whatever the text is, and loses no text."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """Return the events that are certain now. However the text is divided into chunks, the
        joined events are the same."""

    def finish(self) -> list[Event]:
        """Return the text that was held back, and end open calls. Malformed calls are returned as
        Content."""

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> "Constraint | None":
        """Return a grammar of the format for required or named calls, or None if the format cannot
        be enforced."""

    def reasoning_end(self) -> tuple[str, ...]:
        """Return the texts that end the reasoning of this completion (any of them does), or () if
        it does not begin with reasoning. The engine also looks for them in the output, because a
        grammar starts after them."""

    def call_id(self, index: int, name: str) -> str:
        """Return an id for a call that the request forces. The model writes no id for such a call,
        and the templates of some models require ids of a certain form."""


@dataclass(frozen=True, slots=True)
class ChosenParser:
    """The parser of one kind for the served model. make: builds a parser for a completion.
    reads_special: its markers are special tokens, so the text that it reads keeps them. plugin: its
    whole id, for messages."""

    name: str
    make: Callable[[OutputParserSetup], OutputParser]
    reads_special: bool = False
    plugin: str = ""


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers for the answers of the served model. If one is None, its part stays content.
    can_be_compact: structured output can forbid free white space."""

    tool: ChosenParser | None = None
    reasoning: ChosenParser | None = None
    can_be_compact: bool = False
