"""Cuts text at special tokens that are written out in it, as llama.cpp does with
`parse_special`."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard_pack_gguf.vocabulary import SpecialToken

ASCII_SPACE = " \t\n\v\f\r"


def partition(text: str, special_tokens: Sequence[SpecialToken]) -> list[str | int]:
    """Returns plain runs of text and ids, in order. The tokens are searched in the given order,
    each in all the remaining text. So a longer token wins over a shorter one even if the shorter
    one starts earlier."""
    fragments: list[str | int] = [text] if text else []
    for token in special_tokens:
        if token.text in text:
            fragments = [piece for fragment in fragments for piece in _cut(fragment, token)]
    return fragments


def _cut(fragment: str | int, token: SpecialToken) -> list[str | int]:
    if isinstance(fragment, int) or token.text not in fragment:
        return [fragment]
    pieces: list[str | int] = []
    for index, piece in enumerate(fragment.split(token.text)):
        if index:
            pieces.append(token.token_id)
            if token.strips_right:
                piece = piece.lstrip(ASCII_SPACE)
        if piece:
            pieces.append(piece)
    return pieces
