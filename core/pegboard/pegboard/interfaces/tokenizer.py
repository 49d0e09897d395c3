"""Kind `tokenizer`: text ↔ token ids and chat templates, in the API process (A). Keyed by mode
("hf", "gguf", "mistral")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pegboard.interfaces.spec import Need, Spec
from pegboard.interfaces.weight_loader import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec(Spec):
    """supports: `payload`, the set of `TokenizerPayload.format` values that it reads.
    file_patterns: file names (glob). Unless the plugin is asked for by name, the payload's
    directory must contain a file that matches one of them; () = any directory will do.
    reads: file names (glob) that it reads in such a directory. If only a tokenizer is wanted, only
    these files are fetched."""

    file_patterns: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerNeed(Need):
    payload: str | None = None


@dataclass(frozen=True, slots=True)
class TokenizerSetup:
    """checkpoint: as the loader describes it. chat_template: Jinja source that replaces the
    checkpoint's template, if any."""

    checkpoint: Checkpoint
    chat_template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to render. messages: OpenAI-shaped dicts, already validated. tools: OpenAI
    tool dicts or None. add_special_tokens: add the special tokens of a text before the template's
    output. Most templates write these tokens themselves.
    max_chars: refuse a longer text instead of encoding it, and render a template that comes with
    the chat in a limited process. A server sets it, because it does not know who sends the chat.
    None = no limit."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    max_chars: int | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation. text: None if the tokenizer makes the ids directly."""

    token_ids: Sequence[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """token_bytes[i]: the bytes of token i (b"" for special tokens). `size` never exceeds the
    number of embedding rows in a correct checkpoint. eos_token_ids: ids that end a sequence
    according to the tokenizer."""

    token_bytes: Sequence[bytes]
    special_token_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None

    @property
    def size(self) -> int:
        return len(self.token_bytes)

    def longest_token(self) -> int:
        """Return the most characters that one token can stand for. Special tokens, whose texts are
        not known, count as 64."""
        return max(64, *map(len, self.token_bytes))


class TextStream(Protocol):
    """Incremental decoding of one completion: token ids in, text out."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the new text that these ids complete. An unfinished character is held back. All
        pushes and `flush`, joined, equal `decode` of all ids after the prompt."""

    def flush(self) -> str:
        """Return the text that is still held back, with U+FFFD for broken bytes. Called once, at
        the end."""


class Tokenizer(Protocol):
    """Thread-safe. Each API process builds one. It must not import torch or transformers."""

    def render(self, chat: Chat) -> Rendered:
        """Apply the chat template and encode the text. Raises RequestError if the template fails,
        if there is none, or if the chat both continues its last message and starts a new one."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`. Special tokens that are written in the text are
        recognized. Raises RequestError if the text cannot be encoded as UTF-8."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the ids. Ids outside the vocabulary become ""."""

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        """Start incremental decoding after a prompt, whose ids give context and are not part of the
        text."""

    def vocabulary(self) -> Vocabulary:
        """Return the bytes of every token and the special ids. They are computed once and then
        kept."""


class PairTokenizer(Protocol):
    """An optional addition to the Tokenizer. Without it, texts cannot be scored in pairs."""

    def encode_pair(
        self, text: str, second: str, *, limit: int | None
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts, with special tokens, and the type of each token: 1 for
        those of the second text, else 0. limit: the last tokens of the longer text are left out
        until all fit in this number. Raises RequestError as `encode` does, and if the special
        tokens alone do not fit."""
