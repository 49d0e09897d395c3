"""SentencePiece BPE (`tokenizer.ggml.model` "llama"): pieces with scores, ▁ for spaces, bytes for
characters without a piece.

Source: SentencePiece's BPE encoder. The best-scoring pair of neighbors that forms a piece is
joined, leftmost first among equals, until none is left. Pieces rarely contain a ▁ after another
character. When none does, no join crosses the start of a word, so words are encoded separately and
cached.
"""

from __future__ import annotations

import heapq
import re

from pegboard_pack_gguf.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, GGUFVocabulary

SPACE = "▁"
WORD = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
CROSSES_WORDS = re.compile(f"[^{SPACE}]{SPACE}")
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_REMEMBERED = 1 << 16
MAX_WORD_CHARS = 64
"""Longer words are not cached."""


class SentencePieceBPE:
    """Encodes text without special tokens, and knows the bytes of every token."""

    adds_eos = False

    def __init__(self, vocabulary: GGUFVocabulary) -> None:
        self.vocabulary = vocabulary
        self.adds_space = self.starts_with_space = vocabulary.flag("ggml.add_space_prefix", True)
        self.closing_id = vocabulary.token_id("ggml.eos_token_id")
        self.add_bos = vocabulary.flag("ggml.add_bos_token", True)
        bos = vocabulary.token_id("ggml.bos_token_id")
        self.bos_token_id = (
            bos if "ggml.bos_token_id" in vocabulary.data else min(1, len(vocabulary.tokens) - 1)
        )
        self.ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
        self.scores: list[float] = vocabulary.items("ggml.scores", float, int)
        if len(self.scores) != len(vocabulary.tokens):
            raise vocabulary.fail(
                "ggml.scores", f"has {len(self.scores)} items for {len(vocabulary.tokens)} tokens"
            )
        self.byte_ids = [self._byte_id(byte) for byte in range(256)]
        self.word_by_word = not any(CROSSES_WORDS.search(token) for token in vocabulary.tokens)
        self.remembered: dict[str, list[int]] = {}

    def _byte_id(self, byte: int) -> int | None:
        """Returns the id of `<0xAB>`, or of the piece of that one character, or of the unknown
        token."""
        for text in (f"<0x{byte:02X}>", chr(byte) if byte < 0x80 else ""):
            if text in self.ids:
                return self.ids[text]
        return self.vocabulary.token_id("ggml.unknown_token_id")

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", SPACE)
        if not self.word_by_word:
            return self._join(text)
        ids: list[int] = []
        for word in WORD.findall(text):
            word_ids = self.remembered.get(word)
            if word_ids is None:
                word_ids = self._join(word)
                if len(self.remembered) < MAX_REMEMBERED and len(word) <= MAX_WORD_CHARS:
                    self.remembered[word] = word_ids
            ids += word_ids
        return ids

    def _join(self, text: str) -> list[int]:
        """`pieces[i]` is the piece that starts at character i, or "" after it was joined to its
        left neighbor."""
        pieces = list(text)
        before = list(range(-1, len(pieces) - 1))
        behind = [*range(1, len(pieces)), -1]
        waiting: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                joined = pieces[left] + pieces[right]
                token_id = self.ids.get(joined)
                if token_id is not None:
                    heapq.heappush(waiting, (-self.scores[token_id], left, right, joined))

        for index in range(1, len(pieces)):
            offer(index - 1, index)
        while waiting:
            _, left, right, joined = heapq.heappop(waiting)
            if (
                not pieces[left]
                or not pieces[right]
                or len(pieces[left]) + len(pieces[right]) != len(joined)
            ):
                continue  # one of the two was joined to another piece in the meantime
            pieces[left] = joined
            pieces[right] = ""
            behind[left] = behind[right]
            if behind[left] >= 0:
                before[behind[left]] = left
            offer(before[left], left)
            offer(left, behind[left])
        return [token_id for piece in pieces if piece for token_id in self._ids_of(piece)]

    def _ids_of(self, piece: str) -> list[int]:
        token_id = self.ids.get(piece)
        if token_id is not None:
            return [token_id]
        ids = (self.byte_ids[byte] for byte in piece.encode(errors="replace"))
        return [token_id for token_id in ids if token_id is not None]

    def token_bytes(self) -> list[bytes]:
        as_text = set(self.vocabulary.ids_of(UNKNOWN, CONTROL, USER_DEFINED))
        as_byte = set(self.vocabulary.ids_of(BYTE))
        texts = []
        for token_id, token in enumerate(self.vocabulary.tokens):
            byte = BYTE_PIECE.fullmatch(token) if token_id in as_byte else None
            if byte is not None:
                texts.append(bytes([int(byte[1], 16)]))
            else:
                texts.append((token if token_id in as_text else token.replace(SPACE, " ")).encode())
        return texts
