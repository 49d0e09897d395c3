"""Finds the bytes that each token of a vocabulary stands for. They follow from the way its decoder
joins tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable bytes stand for themselves, the others for
    characters from U+0100 on.

    Source: the GPT-2 encoder, https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + position): byte for position, byte in enumerate(others)}


def growths(part: Mapping[str, Any]) -> Iterator[int]:
    """Yields for each replacement in a normalizer or decoder, given as JSON, how much longer it can
    make a text."""
    if part["type"] == "Replace":
        yield max(1, len(part["content"].encode()))
    for step in part.get("normalizers") or part.get("decoders") or ():
        yield from growths(step)


def decoder_steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Returns the decoder of a tokenizer.json as a flat list of its steps."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in decoder_steps(part)]


def is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    """True if decoding only joins the bytes of the tokens."""
    return [step["type"] for step in decoder_steps(decoder)] == ["ByteLevel"]


def bytes_of(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """Returns a function from a token to its bytes in the middle of a text."""
    steps = decoder_steps(decoder)
    types = {step["type"] for step in steps}
    if "ByteLevel" in types:
        return _byte_level_bytes()
    if "WordPiece" in types:
        prefix = next(step["prefix"] for step in steps if step["type"] == "WordPiece")
        return lambda token: (
            token.removeprefix(prefix) if token.startswith(prefix) else " " + token
        ).encode()
    if not steps:  # tokens are joined by spaces
        return lambda token: (" " + token).encode()
    replacements = list(_replacements(steps))
    has_bytes = "ByteFallback" in types

    def sentence_piece(token: str) -> bytes:
        if has_bytes and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return sentence_piece


def _byte_level_bytes() -> Callable[[str], bytes]:
    alphabet = byte_alphabet()

    def byte_level(token: str) -> bytes:
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:  # an added token, which is plain text
            return token.encode()

    return byte_level


def _replacements(steps: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for step in steps:
        match step["type"]:
            case "Metaspace":
                yield step["replacement"], " "
            case "Replace" if isinstance(pattern := step["pattern"].get("String"), str):
                yield pattern, step["content"]
            case "BPEDecoder":
                yield step["suffix"], " "
