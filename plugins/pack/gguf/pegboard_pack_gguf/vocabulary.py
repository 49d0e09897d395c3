"""The vocabulary of a GGUF file: tokens, their types and the settings around them. It is checked
when it is read. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError

UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
"""Values of `tokenizer.ggml.token_type`; 1 is a normal token."""

END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Control tokens that end a turn, whatever the file says. GGUF has room for only one end token. The
list is llama.cpp's."""

KEEPS_SPACES_BEHIND = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi-3's special tokens, except these, remove the whitespace after them (GGUF does not store this;
rule: llama.cpp)."""


def end_token_ids(data: Mapping[str, Any]) -> list[int]:
    """Returns every id that ends a sequence: the file's own, then tokens known to end a turn.
    Accepts any data, even incomplete."""
    tokens = data.get("ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    named = (data.get(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ids = [token_id for token_id in named if type(token_id) is int and 0 <= token_id < len(tokens)]
    return list(
        dict.fromkeys(
            [*ids, *(token_id for token_id, text in enumerate(tokens) if text in END_TEXTS)]
        )
    )


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is recognized when its text is written out. strips_right: white space after it
    is dropped."""

    text: str
    token_id: int
    strips_right: bool = False


class GGUFVocabulary:
    """Reads the vocabulary. `data` is the tokenizer payload from the loader. Raises ModelError when
    it is incomplete or contradicts itself."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.path = data.get("path", "the GGUF file")
        self.model = self.text("ggml.model") or ""
        self.tokens: list[str] = self.items("ggml.tokens", str)
        if not self.tokens:
            raise self.fail("ggml.tokens", "is missing or empty: this file has no vocabulary")
        self.types: list[int] = self.items("ggml.token_type", int) or [1] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self.fail(
                "ggml.token_type", f"has {len(self.types)} items for {len(self.tokens)} tokens"
            )
        if not END_TEXTS.isdisjoint(self.tokens):  # some converters marked these as normal tokens
            self.types = [
                CONTROL if text in END_TEXTS else kind
                for text, kind in zip(self.tokens, self.types, strict=True)
            ]

    def fail(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.path}: metadata tokenizer.{key} {what}")

    def items(self, key: str, *kinds: type) -> list[Any]:
        """Returns a list whose items all have one of these types, or [] when the file has none."""
        value = self.data.get(key, [])
        if not isinstance(value, list) or not set(map(type, value)) <= set(kinds):
            raise self.fail(key, f"is not a list of {' or '.join(kind.__name__ for kind in kinds)}")
        return value

    def text(self, key: str) -> str | None:
        value = self.data.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, f"is {value!r}, expected text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        return default if value is None else bool(value)

    def token_id(self, key: str) -> int | None:
        """Returns an id below the vocabulary's size. Other values mean "none" (as in llama.cpp)."""
        value = self.data.get(key)
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def token_text(self, key: str) -> str | None:
        token_id = self.token_id(key)
        return None if token_id is None else self.tokens[token_id]

    def ids_of(self, *types: int) -> Iterator[int]:
        return (token_id for token_id, kind in enumerate(self.types) if kind in types)

    def chat_templates(self) -> dict[str, str]:
        """Returns Jinja sources by name: `tokenizer.chat_template` is "default",
        `tokenizer.chat_template.NAME` are the others."""
        key = "chat_template"
        named = {
            name: self.text(name) for name in self.data if name == key or name.startswith(f"{key}.")
        }
        return {
            name.removeprefix(key).lstrip(".") or "default": source
            for name, source in named.items()
            if source is not None
        }

    def special_tokens(self) -> list[SpecialToken]:
        """Sorted by length in bytes, longest first. Text is searched for them in this order."""
        name = str(self.data.get("name", "")).lower()
        strips = "phi-3" in name or "phi3" in name
        tokens_found = [
            SpecialToken(text, token_id, strips and text not in KEEPS_SPACES_BEHIND)
            for token_id in self.ids_of(UNKNOWN, CONTROL, USER_DEFINED)
            if (text := self.tokens[token_id])
        ]
        return sorted(tokens_found, key=lambda token: len(token.text.encode()), reverse=True)
