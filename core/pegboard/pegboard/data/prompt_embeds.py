"""Embeddings that come with a request. This file does not import numpy, because the API process
loads it at once."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from pegboard.errors import RequestError

EMBEDS_DTYPES = ("float32", "float16", "bfloat16")


class PromptEmbeds(msgspec.Struct, frozen=True):
    """A span of a prompt as embeddings: what `Model.embed` would return for its tokens. data: the
    rows one after the other, little-endian. dtype: float32, float16 or bfloat16. shape: (tokens,
    width). start: position of the first row in the prompt. path: of the field, for errors. The
    engine checks all of it."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    path: str = "prompt_embeds"

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + (self.shape[0] if self.shape else 0)

    @classmethod
    def of(cls, value: Any, start: int = 0, path: str = "prompt_embeds") -> "PromptEmbeds":
        """Return a torch tensor or a numpy array as plain values. Its shape is [tokens, width] or
        [1, tokens, width]. Raises RequestError for anything else; the engine checks the position,
        the width and the values."""
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        if dtype not in EMBEDS_DTYPES:
            got = f"dtype {dtype}" if dtype else type(value).__name__
            known = ", ".join(EMBEDS_DTYPES)
            raise wrong_embeds(
                path, f"expected a torch tensor or a numpy array of {known}, got {got}"
            )
        shape = tuple(value.shape)
        shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
        if len(shape) != 2:
            raise wrong_embeds(path, f"expected the shape [tokens, width], got {list(value.shape)}")
        if hasattr(value, "detach"):  # a tensor, so torch is loaded
            value = value.detach().cpu().contiguous().view(sys.modules["torch"].uint8).numpy()
        return cls(value.tobytes(), dtype, shape, start, path)


def wrong_embeds(path: str, reason: str) -> RequestError:
    """Return the error for rows of the field `path`."""
    return RequestError(f"{path}: {reason}", parameter=path)
