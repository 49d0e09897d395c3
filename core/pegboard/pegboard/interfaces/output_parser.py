"""Kinds `tool_parser` and `reasoning_parser` (provisional): text of a completion → events. One interface for both. Runs in A."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from pegboard.interfaces.structured_output import Constraint
    from pegboard.interfaces.tokenizer import Tokenizer, Vocabulary

PROMPT_END_TOKENS = 64
"""A parser sees this many tokens of the prompt's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParserSpec(Spec):
    """flags: `special_tokens` = its markers are special tokens of the model, so these stay in the text it reads."""

    FLAGS = frozenset({"special_tokens"})


@dataclass(frozen=True, slots=True)
class OutputParserSetup:
    """vocabulary: for token-level markers. tools: the request's tools (OpenAI-shaped). template_kwargs: the request's switches
    for the chat template (`enable_thinking`, …). prompt_end: the last characters of the rendered prompt, special tokens
    included: it shows whether the template has already opened or closed the reasoning."""

    vocabulary: "Vocabulary"
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_end: str = ""

    @classmethod
    def after_prompt(
        cls,
        tokenizer: "Tokenizer",
        prompt_token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> "OutputParserSetup":
        """For the answer to this prompt."""
        end = tokenizer.decode(prompt_token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        return cls(tokenizer.vocabulary(), tuple(tools), template_kwargs or {}, end)


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
    """One per completion. It never raises, whatever the text is, and loses nothing."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """Events that are certain now; any chunking gives the same fold."""

    def finish(self) -> list[Event]:
        """Held-back text and open calls; malformed calls come back as Content."""

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> "Constraint | None":
        """Grammar of the format for required or named calls; None = it cannot be enforced."""

    def reasoning_end(self) -> tuple[str, ...]:
        """Texts, any of which ends the reasoning of this completion; () = it does not begin with reasoning. The engine looks for
        them in the output too: a grammar starts after them."""

    def call_id(self, index: int, name: str) -> str:
        """The id of a call that the request forces, because the model then writes none. The templates of some models demand ids
        of a certain form."""


@dataclass(frozen=True, slots=True)
class ChosenParser:
    """The parser of one kind for the served model. make: builds one for a completion. reads_special: its markers are special
    tokens, so these stay in the text it reads."""

    name: str
    make: Callable[[OutputParserSetup], OutputParser]
    reads_special: bool = False


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers that read the answers of the served model; None = that part stays content. can_be_compact: structured output
    can forbid free white space."""

    tool: ChosenParser | None = None
    reasoning: ChosenParser | None = None
    can_be_compact: bool = False
