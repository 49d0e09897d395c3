"""Finds the bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import re

from mistral_common.tokens.tokenizers.base import Tokenizer
from mistral_common.tokens.tokenizers.tekken import SpecialTokenPolicy, Tekkenizer

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "▁"
UNKNOWN = " ⁇ "
"""The text that SentencePiece writes for a character outside its vocabulary."""


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Returns the bytes by id. For special tokens, they are the bytes of their text."""
    if isinstance(tokenizer, Tekkenizer):
        return [
            tokenizer.id_to_byte_piece(token_id, SpecialTokenPolicy.KEEP)
            for token_id in range(tokenizer.n_words)
        ]
    return [_piece_bytes(tokenizer, token_id) for token_id in range(tokenizer.n_words)]


def _piece_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    piece = tokenizer.id_to_piece(token_id)
    if tokenizer.is_special(token_id):
        return piece.encode()
    if match := BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    if token_id == tokenizer.unk_id:
        return UNKNOWN.encode()
    return piece.replace(SPACE, " ").encode()
