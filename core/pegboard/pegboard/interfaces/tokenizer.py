"""Kind `tokenizer`: text ↔ token ids and chat templates, in the API process (A). Keyed by mode ("hf", "gguf", "mistral")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pegboard.interfaces.spec import Need, Spec
from pegboard.interfaces.weight_loader import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec(Spec):
    """supports: `payload`, the set of `TokenizerPayload.format` values it reads. file_patterns: file names (glob), one of
    which must lie in the payload's directory for it to be chosen without being asked for; () = any directory will do.
    reads: file names (glob) that it reads in such a directory; these are fetched where only a tokenizer is wanted."""

    file_patterns: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerNeed(Need):
    payload: str | None = None


@dataclass(frozen=True, slots=True)
class TokenizerSetup:
    """The described checkpoint, and a chat template that overrides the checkpoint's (Jinja source), if any."""

    checkpoint: Checkpoint
    chat_template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to render. messages: OpenAI-shaped dicts, already validated. tools: OpenAI tool dicts or None.
    add_special_tokens: put the special tokens of a text in front of what the template writes; most templates write them
    themselves."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation: its token ids, and its text unless the tokenizer makes the ids directly."""

    token_ids: Sequence[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """token_bytes[i]: the bytes token i stands for (b"" for special tokens). `size` may exceed the embedding's rows only by
    error. eos_token_ids: ids that end a sequence, as the tokenizer says."""

    token_bytes: Sequence[bytes]
    special_token_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None

    @property
    def size(self) -> int:
        return len(self.token_bytes)


class TextStream(Protocol):
    """Incremental decoding of one completion."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text that these ids complete; an unfinished character is held back. Joined pushes plus `flush` equal
        `decode` of all ids (after the prompt)."""

    def flush(self) -> str:
        """The text that is still held back, with U+FFFD for broken bytes. Called once, at the end."""


class Tokenizer(Protocol):
    """Thread-safe. Built once per API process; must not import torch or transformers."""

    def render(self, chat: Chat) -> Rendered:
        """Apply the chat template and encode the text. Raises RequestError on a template error, when there is no template,
        and for a chat that both continues its last message and starts a new one."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens that are written out in the text are recognized. Raises RequestError for text that
        cannot be written as UTF-8."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of the ids; ids outside the vocabulary become ""."""

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        """Start incremental decoding after a prompt (its ids are context, not output)."""

    def vocabulary(self) -> Vocabulary:
        """Bytes of every token and the special ids; computed once, then kept."""
