"""Reads the index of a file of tensorizer, without torch and without the library, which imports
torch.

The file begins with 5 bytes of magic, the version (4 bytes), flags (32 bytes), a size that is not
used (8 bytes), 8 unused bytes and the number of tensors (8 bytes), all little-endian. Then come the
bytes of the index (8 bytes) and the index. An entry is the name (its length in 2 bytes), the kind
of tensor (1 byte), the type (its length in 1 byte), the shape (the number of dimensions in 1 byte,
4 or 8 bytes for each) and the places of the tensor's header and data and the bytes of the data (8
bytes each). With the flag `VERSIONED`, 4 bytes before an entry say whether its dimensions have 4 or
8 bytes.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from pegboard.data.checkpoint_file import POINTER, refuse_pointer
from pegboard.errors import ModelError, brief
from pegboard.interfaces.weight_loader import TensorEntry

MAGIC = b"|TZR|"
HEADER = struct.Struct("<I32sQ8xQ")
MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_VERSION = 5
ENCRYPTED_VERSION = 3
LONG_VERSION = 5
ENCRYPTED = 1
VERSIONED = 2
TYPES = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u8": "uint64",
    "u4": "uint32",
    "u2": "uint16",
    "u1": "uint8",
    "b1": "bool",
}
"""numpy's code of a type, without its order of bytes → the name of torch."""
ITEM_BYTES = {name: int(code[1]) for code, name in TYPES.items()} | {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class Index:
    """The tensors of one file by name, and what changes with the index, as text."""

    tensors: dict[str, TensorEntry]
    stamp: str


def read_index(path: Path) -> Index:
    """Raises ModelError if the file is missing, truncated, encrypted or inconsistent."""
    try:
        facts = path.stat()
        with path.open("rb") as file:
            start = file.read(len(POINTER))
            refuse_pointer(path, start)
            if not start.startswith(MAGIC):
                raise ModelError(f"{path} is no file of tensorizer; it begins with {start[:8]!r}")
            file.seek(len(MAGIC))
            version, flags, _, count = HEADER.unpack(file.read(HEADER.size))
            marks = int.from_bytes(flags, "little") if version > ENCRYPTED_VERSION else 0
            if version == ENCRYPTED_VERSION or marks & ENCRYPTED:
                raise ModelError(f"{path} is encrypted, which is not supported")
            if version > MAX_VERSION:
                raise ModelError(f"{path} has version {version}; at most {MAX_VERSION} is read")
            (size,) = struct.unpack("<Q", file.read(8))
            if size > MAX_INDEX_BYTES:
                raise ModelError(f"{path} is damaged: its index has {size} bytes")
            raw = file.read(size)
        entries = _Entries(path, raw, bool(marks & VERSIONED), facts.st_size)
        tensors = {entry.name: entry for entry in (entries.next() for _ in range(count))}
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is truncated or damaged: {error}; fetch it again") from error
    digest = hashlib.sha256(raw).hexdigest()
    return Index(tensors, f"{digest}:{facts.st_size}:{facts.st_mtime_ns}")


class _Entries:
    """The entries of an index, one after the other. file_bytes: of the whole file."""

    def __init__(self, path: Path, raw: bytes, is_versioned: bool, file_bytes: int) -> None:
        self.path = path
        self.raw = raw
        self.is_versioned = is_versioned
        self.file_bytes = file_bytes
        self.place = 0

    def _numbers(self, layout: str) -> tuple[int, ...]:
        numbers = struct.unpack_from(f"<{layout}", self.raw, self.place)
        self.place += struct.calcsize(f"<{layout}")
        return numbers

    def _text(self, length_layout: str) -> str:
        (length,) = self._numbers(length_layout)
        text = self.raw[self.place : self.place + length]
        self.place += length
        return text.decode()

    def next(self) -> TensorEntry:
        version = self._numbers("I")[0] if self.is_versioned else 0
        name = self._text("H")
        if not name or name.startswith("\x1e"):
            raise ModelError(f"{self.path} has a tensor in a list or without a name")
        self._numbers("B")
        code = self._text("B")
        (dimensions,) = self._numbers("B")
        shape = self._numbers(f"{dimensions}{'Q' if version >= LONG_VERSION else 'I'}")
        _, offset, num_bytes = self._numbers("QQQ")
        plain, _, opaque = code.partition("\0")
        stored = opaque.removeprefix("torch.") or TYPES.get(plain.lstrip("<|="))
        where = f"{self.path}: tensor {name!r}"
        if stored not in ITEM_BYTES:
            raise ModelError(f"{where} has type {brief(code)}; known: {', '.join(ITEM_BYTES)}")
        expected = math.prod(shape) * ITEM_BYTES[stored]
        if num_bytes != expected:
            raise ModelError(f"{where} has {num_bytes} bytes; {shape} of {stored} has {expected}")
        if offset + num_bytes > self.file_bytes:
            raise ModelError(
                f"{where} ends at byte {offset + num_bytes} of {self.file_bytes}: the file is "
                "truncated; fetch it again"
            )
        return TensorEntry(name, shape, stored, self.path.name, offset, num_bytes)
