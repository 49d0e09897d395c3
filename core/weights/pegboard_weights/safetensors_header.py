"""Reads the header of a safetensors file, with bounds checks and without torch.

The format (https://huggingface.co/docs/safetensors) is: 8 bytes with the length N of the header,
little-endian; N bytes of JSON, {name: {"dtype", "shape", "data_offsets": [begin, end]}} and an
optional "__metadata__"; the data, with offsets that count from the end of the header.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from pegboard.data.checkpoint_file import POINTER, refuse_pointer
from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import TensorEntry

MAX_HEADER_BYTES = 64 * 1024 * 1024
TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of one file by name, the sha256 of the header's bytes, and the size of the whole
    file."""

    tensors: dict[str, TensorEntry]
    sha256: str
    file_bytes: int


def read_header(path: Path) -> Header:
    """Read the header of a file. Raises ModelError if the file is missing, truncated or
    inconsistent."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(POINTER))
            refuse_pointer(path, start)
            if len(start) < 8:
                raise ModelError(
                    f"{path} is not a safetensors file: it has only {file_bytes} bytes; fetch it "
                    "again"
                )
            length = int.from_bytes(start[:8], "little")
            if length > MAX_HEADER_BYTES:
                message = (
                    f"it begins with {start[:16]!r} instead of the length of a header of at most "
                    f"{MAX_HEADER_BYTES} bytes"
                )
                raise ModelError(f"{path} is not a safetensors file: {message}; fetch it again")
            if 8 + length > file_bytes:
                message = f"the header ends at byte {8 + length}, the file at {file_bytes}"
                raise ModelError(f"{path} is truncated: {message}; fetch it again")
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is damaged: its header is not JSON ({error}); fetch it again"
        ) from error
    if not isinstance(header, dict):
        raise ModelError(
            f"{path} is damaged: its header is a JSON {type(header).__name__}, expected an "
            "object; fetch it again"
        )
    first = 8 + length
    tensors = {
        name: _entry(path, name, value, first, file_bytes - first)
        for name, value in header.items()
        if name != "__metadata__"
    }
    _refuse_overlap(path, tensors)
    return Header(tensors, hashlib.sha256(raw).hexdigest(), file_bytes)


def _entry(path: Path, name: str, value: Any, start: int, data_bytes: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict):
        raise ModelError(f"{where} is described by {value!r}, expected an object")
    dtype = value.get("dtype")
    shape = value.get("shape")
    offsets = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in TORCH_NAMES:
        raise ModelError(f"{where} has type {dtype!r}; known: {', '.join(TORCH_NAMES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ModelError(
            f"{where} has shape {shape!r} and offsets {offsets!r}, expected non-negative integers"
        )
    begin, end = offsets
    if end > data_bytes:
        raise ModelError(
            f"{where} ends at byte {end} of {data_bytes} bytes of data: the file is truncated; "
            "fetch it again"
        )
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != expected:
        raise ModelError(
            f"{where} has {end - begin} bytes; its shape {shape} of {dtype} needs {expected}"
        )
    return TensorEntry(name, tuple(shape), TORCH_NAMES[dtype], path.name, start + begin, expected)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _refuse_overlap(path: Path, tensors: dict[str, TensorEntry]) -> None:
    previous: TensorEntry | None = None
    for entry in sorted(tensors.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if previous is not None and entry.offset < previous.offset + previous.num_bytes:
            raise ModelError(
                f"{path} is damaged: tensors {previous.name!r} and {entry.name!r} overlap"
            )
        previous = entry
