"""Prompts as embeddings: the checks of the engine, and what they add to the block hashes."""

from __future__ import annotations

import hashlib

import numpy as np

from pegboard.data.request import PromptEmbeds
from pegboard.errors import RequestError

_FORMS = {"float32": ("<u4", 0x7F800000), "float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80)}
"""dtype → the integers of its bits, and the bits of the exponent. All of them are set in NaN and in
infinity."""


def check_embeds(embeds: PromptEmbeds, width: int) -> None:
    """Raise RequestError unless these are finite rows of `width` numbers. width: 0 = prompts as
    embeddings are off."""

    def refuse(reason: str) -> RequestError:
        return RequestError(f"prompt_embeds: {reason}", parameter="prompt_embeds")

    if not width:
        raise refuse(
            "prompts as embeddings are off; start with enable_prompt_embeds "
            "(--enable-prompt-embeds)"
        )
    if embeds.dtype not in _FORMS:
        raise refuse(f"dtype must be one of {', '.join(_FORMS)}, got {embeds.dtype:.40}")
    if len(embeds.shape) != 2 or embeds.shape[0] < 1 or embeds.shape[1] != width:
        raise refuse(
            f"expected the shape [tokens, {width}] of this model's embeddings, got "
            f"{list(embeds.shape)}"
        )
    integers, exponent = _FORMS[embeds.dtype]
    expected = embeds.shape[0] * width * np.dtype(integers).itemsize
    if len(embeds.data) != expected:
        raise refuse(
            f"{list(embeds.shape)} numbers of {embeds.dtype} are {expected} bytes, got "
            f"{len(embeds.data)}"
        )
    bits = np.frombuffer(embeds.data, integers)
    broken = np.flatnonzero(bits & exponent == exponent)
    if len(broken):
        raise refuse(
            f"row {broken[0] // width} has a value that is NaN or infinite; every value must be "
            "finite"
        )


def rows_digest(embeds: PromptEmbeds, start: int, stop: int) -> str:
    """Return a hash of the rows from `start` to `stop`, or to their end."""
    row_bytes = len(embeds.data) // embeds.shape[0]
    return (
        embeds.dtype + hashlib.sha256(embeds.data[start * row_bytes : stop * row_bytes]).hexdigest()
    )
