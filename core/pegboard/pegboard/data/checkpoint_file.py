"""Reads the JSON and text files of a checkpoint. They come from strangers, so every read has a size
limit."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from pegboard.errors import ModelError

MAX_BYTES = 32 * 1024 * 1024
"""Limit of a file that describes a model. The largest known ones have about 10 MB."""
POINTER = b"version https://git-lfs.github.com/spec/v1"
"""How a file begins that Git LFS has left in the place of the real one."""


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular file. Raises ModelError if it cannot be read, is larger than
    `max_bytes` or is not UTF-8."""
    try:
        # a pipe has no end
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ModelError(f"{path} is not a regular file")
            raw = file.read(max_bytes + 1)
        text = raw.decode("utf-8")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: {error}") from error
    refuse_pointer(path, raw)
    if len(raw) > max_bytes:
        raise ModelError(
            f"{path} is larger than {max_bytes} bytes, more than any file of its kind; fetch the "
            "model again"
        )
    return text


def refuse_pointer(path: Path, start: bytes) -> None:
    """Raise ModelError if a file that begins with `start` is a pointer of Git LFS."""
    if start.startswith(POINTER):
        raise ModelError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in {path.parent}"
        )


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError as `read_text` does, or if the file
    contains something else."""
    text = read_text(path, max_bytes)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} contains a JSON {type(value).__name__}, expected an object")
    return value
