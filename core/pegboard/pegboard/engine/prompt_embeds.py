"""Prompts as embeddings: the checks of the engine, and what they add to the block hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from pegboard.data.prompt_embeds import PromptEmbeds, wrong_embeds

_FORMS = {"float32": ("<u4", 0x7F800000), "float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80)}
"""dtype → the integers of its bits, and the bits of the exponent. All of them are set in NaN and in
infinity."""


def check_embeds(spans: Sequence[PromptEmbeds], width: int, num_tokens: int) -> None:
    """Raise RequestError unless these are finite rows of `width` numbers, at positions of a prompt
    of `num_tokens` tokens."""
    end = 0
    for span in spans:
        _check_rows(span, width)
        if span.start < end or span.stop > num_tokens:
            raise wrong_embeds(
                span.path,
                f"the rows for the positions {span.start} to {span.stop - 1} of the prompt must be "
                f"in the positions {end} to {num_tokens - 1}, which are still free",
            )
        end = span.stop


def _check_rows(embeds: PromptEmbeds, width: int) -> None:
    if embeds.dtype not in _FORMS:
        known = ", ".join(_FORMS)
        raise wrong_embeds(embeds.path, f"dtype must be one of {known}, got {embeds.dtype:.40}")
    if len(embeds.shape) != 2 or embeds.shape[0] < 1 or embeds.shape[1] != width:
        raise wrong_embeds(
            embeds.path,
            f"expected the shape [tokens, {width}] of this model's embeddings, got "
            f"{list(embeds.shape)}",
        )
    integers, exponent = _FORMS[embeds.dtype]
    expected = embeds.shape[0] * width * np.dtype(integers).itemsize
    if len(embeds.data) != expected:
        raise wrong_embeds(
            embeds.path,
            f"{list(embeds.shape)} numbers of {embeds.dtype} are {expected} bytes, got "
            f"{len(embeds.data)}",
        )
    bits = np.frombuffer(embeds.data, integers)
    broken = np.flatnonzero(bits & exponent == exponent)
    if len(broken):
        raise wrong_embeds(
            embeds.path,
            f"row {broken[0] // width} has a value that is NaN or infinite; every value must be "
            "finite",
        )


def rows_digest(embeds: PromptEmbeds, start: int, stop: int) -> str:
    """Return a hash of the rows at the positions start … stop of the prompt."""
    row_bytes = len(embeds.data) // embeds.shape[0]
    first, end = ((bound - embeds.start) * row_bytes for bound in (start, stop))
    return embeds.dtype + hashlib.sha256(embeds.data[first:end]).hexdigest()
