"""SentencePiece unigram (`tokenizer.ggml.model` "t5"): the pieces whose scores have the largest
sum.

Source: SentencePiece's unigram encoder and normalizer. As there, scores are added in float32, and
the first of equal sums is kept.
"""

from __future__ import annotations

import struct

import numpy as np

from pegboard_pack_gguf.sentencepiece_bpe import BYTE_PIECE, SPACE
from pegboard_pack_gguf.vocabulary import (
    BYTE,
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GGUFVocabulary,
)

UNKNOWN_PENALTY = np.float32(10.0)
MAX_PIECE_CHARS = 512
"""Longer pieces are never used: they would make every text slow to encode."""


class Unigram:
    """Encodes text without special tokens, and knows the bytes of every token."""

    adds_space = False
    adds_eos = True

    def __init__(self, vocabulary: GGUFVocabulary) -> None:
        self.vocabulary = vocabulary
        self.starts_with_space = vocabulary.flag("ggml.add_space_prefix", True)
        self.drops_spaces = vocabulary.flag("ggml.remove_extra_whitespaces", True)
        self.add_bos = vocabulary.flag("ggml.add_bos_token", False)
        self.bos_token_id = vocabulary.token_id("ggml.bos_token_id")
        self.closing_id = vocabulary.token_id("ggml.eos_token_id")
        self.unknown_id = vocabulary.token_id("ggml.unknown_token_id")
        scores = vocabulary.items("ggml.scores", float, int)
        if len(scores) != len(vocabulary.tokens):
            raise vocabulary.fail(
                "ggml.scores", f"has {len(scores)} items for {len(vocabulary.tokens)} tokens"
            )
        hidden = set(vocabulary.ids_of(UNKNOWN, CONTROL, UNUSED, BYTE))
        self.pieces = {
            token: (token_id, np.float32(scores[token_id]))
            for token_id, token in enumerate(vocabulary.tokens)
            if token and token_id not in hidden and len(token) <= MAX_PIECE_CHARS
        }
        self.longest = max(map(len, self.pieces), default=0)
        self.unknown_score = (
            min((score for _, score in self.pieces.values()), default=np.float32(0))
            - UNKNOWN_PENALTY
        )
        self.byte_ids = {
            int(match[1], 16): token_id
            for token_id in vocabulary.ids_of(BYTE)
            if (match := BYTE_PIECE.fullmatch(vocabulary.tokens[token_id]))
        }
        self.normalizer = Charsmap(vocabulary)

    def encode(self, text: str) -> list[int]:
        text = self._normalized(text)
        ids: list[int] = []
        was_unknown = False
        for piece in self._best(text):
            entry = self.pieces.get(piece)
            if entry is not None:
                ids.append(entry[0])
            elif len(self.byte_ids) == 256:
                ids += [self.byte_ids[byte] for byte in piece.encode()]
            elif self.unknown_id is not None and not was_unknown:
                ids.append(self.unknown_id)
            was_unknown = entry is None
        return ids

    def _normalized(self, text: str) -> str:
        text = self.normalizer.replaced(text)
        if self.drops_spaces:
            text = " ".join(part for part in text.split(" ") if part)
        if self.starts_with_space and text:
            text = " " + text
        return text.replace(" ", SPACE)

    def _best(self, text: str) -> list[str]:
        """`best[i]` is the best sum of scores of text[:i], and where its last piece starts."""
        best: list[tuple[np.float32, int] | None] = [(np.float32(0), -1), *[None] * len(text)]
        for start in range(len(text)):
            here = best[start]
            assert here is not None, "every character is reached, if only as an unknown one"
            for end in range(start + 1, min(start + self.longest, len(text)) + 1):
                entry = self.pieces.get(text[start:end])
                if entry is not None:
                    self._offer(best, start, end, here[0] + entry[1])
            if text[start] not in self.pieces:
                self._offer(best, start, start + 1, here[0] + self.unknown_score)
        pieces = []
        end = len(text)
        while end > 0:
            last = best[end]
            assert last is not None
            pieces.append(text[last[1] : end])
            end = last[1]
        return pieces[::-1]

    @staticmethod
    def _offer(
        best: list[tuple[np.float32, int] | None], start: int, end: int, score: np.float32
    ) -> None:
        known = best[end]
        if known is None or score > known[0]:
            best[end] = (score, start)

    def token_bytes(self) -> list[bytes]:
        as_text = set(self.vocabulary.ids_of(UNKNOWN, CONTROL, USER_DEFINED))
        by_id = {token_id: bytes([byte]) for byte, token_id in self.byte_ids.items()}
        return [
            by_id.get(token_id)
            or (token if token_id in as_text else token.replace(SPACE, " ")).encode()
            for token_id, token in enumerate(self.vocabulary.tokens)
        ]


class Charsmap:
    """Replaces the longest known sequences of bytes, from left to right.

    `tokenizer.ggml.precompiled_charsmap` holds: the size of a trie in bytes (u32), the trie as a
    double array of u32, and the replacements, each with a zero byte after it. A unit of the trie
    has its label in the lowest eight bits and bit 31, the distance to its children in the bits from
    10 on (in steps of 256 if bit 9 is set), and bit 8 if a value follows.
    """

    def __init__(self, vocabulary: GGUFVocabulary) -> None:
        stored = vocabulary.items("ggml.precompiled_charsmap", int)
        data = bytes(number & 0xFF for number in stored)
        self.units: tuple[int, ...] = ()
        self.replacements = b""
        self.known: dict[str, str] = {}
        if not data:
            return
        size = struct.unpack_from("<I", data)[0] if len(data) >= 4 else 0
        if size % 4 or not 4 <= size <= len(data) - 4:
            raise vocabulary.fail(
                "ggml.precompiled_charsmap", "is damaged: its trie does not fit in it"
            )
        self.units = struct.unpack_from(f"<{size // 4}I", data, 4)
        self.replacements = data[4 + size :]

    def replaced(self, text: str) -> str:
        if not self.units:
            return text
        source = text.encode()
        parts = []
        at = 0
        while at < len(source):
            length, replacement = self._longest(source, at)
            if not length:
                length = (
                    1
                    if source[at] < 0x80
                    else 2
                    if source[at] < 0xE0
                    else 3
                    if source[at] < 0xF0
                    else 4
                )
                replacement = source[at : at + length]
            parts.append(replacement)
            at += length
        return b"".join(parts).decode(errors="replace")

    def _longest(self, source: bytes, at: int) -> tuple[int, bytes]:
        """Returns the length of the longest known sequence at `at`, or 0, and what replaces it."""
        position = self._children(0)
        length = 0
        value = 0
        for index in range(at, len(source)):
            position ^= source[index]
            if position >= len(self.units) or self.units[position] & 0x800000FF != source[index]:
                break
            has_value = self.units[position] >> 8 & 1
            position = self._children(position)
            if has_value and position < len(self.units):
                length = index + 1 - at
                value = self.units[position] & 0x7FFFFFFF
        end = self.replacements.find(b"\0", value) if value < len(self.replacements) else -1
        return (length, self.replacements[value:end]) if length and end >= 0 else (0, b"")

    def _children(self, position: int) -> int:
        unit = self.units[position]
        return position ^ (unit >> 10 << (unit >> 9 & 1) * 8)
