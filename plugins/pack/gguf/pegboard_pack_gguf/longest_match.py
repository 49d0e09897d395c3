"""RWKV's tokenizer (`tokenizer.ggml.model` "rwkv"): the longest token at each place, from left to
right, by bytes.

Tokens are stored as Python writes bytes: "\\n", "\\xff", "\\\\".
"""

from __future__ import annotations

import re

from pegboard_pack_gguf.vocabulary import GGUFVocabulary

ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[ntr'\"\\])")
MEANINGS = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}


class LongestMatch:
    """Encodes text without special tokens, and knows the bytes of every token."""

    adds_space = starts_with_space = adds_eos = False

    def __init__(self, vocabulary: GGUFVocabulary) -> None:
        self.vocabulary = vocabulary
        self.add_bos = vocabulary.flag("ggml.add_bos_token", False)
        self.bos_token_id = vocabulary.token_id("ggml.bos_token_id")
        self.closing_id = vocabulary.token_id("ggml.eos_token_id")
        self.unknown_id = vocabulary.token_id("ggml.unknown_token_id")
        self.bytes_of = [_unescaped(token) for token in vocabulary.tokens]
        special = {token.token_id for token in vocabulary.special_tokens()}
        self.ids = {
            text: token_id
            for token_id, text in enumerate(self.bytes_of)
            if text and token_id not in special
        }
        self.lengths: dict[int, list[int]] = {}
        for text in self.ids:
            self.lengths.setdefault(text[0], []).append(len(text))
        self.lengths = {
            first: sorted(set(lengths), reverse=True) for first, lengths in self.lengths.items()
        }

    def encode(self, text: str) -> list[int]:
        source = text.encode()
        ids = []
        at = 0
        while at < len(source):
            length = next(
                (n for n in self.lengths.get(source[at], ()) if source[at : at + n] in self.ids), 0
            )
            token_id = self.ids[source[at : at + length]] if length else self.unknown_id
            if token_id is not None:
                ids.append(token_id)
            at += length or 1
        return ids

    def token_bytes(self) -> list[bytes]:
        return self.bytes_of


def _unescaped(token: str) -> bytes:
    def meaning(match: re.Match[bytes]) -> bytes:
        name = match[1]
        return bytes([int(name[1:], 16)]) if name.startswith(b"x") else MEANINGS.get(name, name)

    return ESCAPE.sub(meaning, token.encode())
