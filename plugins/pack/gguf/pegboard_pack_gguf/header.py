"""Reads the header of a GGUF file (versions 2 and 3, little endian). Standard library only.

Layout (specification: ggml docs/gguf.md), all numbers little endian:

    "GGUF" | version u32 | tensor_count u64 | kv_count u64
    kv_count ×     key string | value type u32 | value          string = length u64, UTF-8 bytes
    tensor_count × name string | num_dims u32 | dims u64 × num_dims | type u32 | offset u64
    padding to `general.alignment` | tensor data, each tensor at data_start + offset

Every count and length is checked against the bytes that are left before anything is allocated, so a
damaged file costs no more than its own size.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pegboard.data.checkpoint_file import POINTER, refuse_pointer
from pegboard.errors import ModelError
from pegboard_pack_gguf.ggml_types import GGML_TYPES, NEVER_STORED, GGMLType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
STRING = 8
ARRAY = 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
MIN_KV_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of the file. shape: rows first (the file stores the reverse order). offset: the
    position of the first byte in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a file. `sha256` covers the header's bytes: metadata and tensor index, not the
    weights."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]
    file_bytes: int
    sha256: str


def read_header(path: Path) -> GGUFHeader:
    """Reads the header of a file. Raises ModelError that names the file and the error in it."""
    try:
        with path.open("rb") as file:
            start = file.read(len(POINTER))
            refuse_pointer(path, start)
            if not start.startswith(MAGIC):
                raise ModelError(
                    f"{path} is not a GGUF file: it starts with {start[: len(MAGIC)]!r} instead "
                    f"of {MAGIC!r}; fetch it again"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise ModelError(f"cannot read the GGUF file {path}: {error}") from error


class _Reader:
    """A position in the mapped file. It refuses to move past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.end = len(data)
        self.position = len(MAGIC)

    def fail(self, what: str) -> NoReturn:
        raise ModelError(
            f"damaged GGUF file {self.path}: {what} (at byte {self.position} of {self.end}); "
            "fetch it again"
        )

    def header(self) -> GGUFHeader:
        version = self.u32("version")
        if version not in VERSIONS:
            if version and version & 0xFFFF == 0:
                raise ModelError(
                    f"{self.path} is a big-endian GGUF file; only little-endian files are supported"
                )
            raise ModelError(
                f"{self.path} has GGUF version {version}; versions {VERSIONS} are supported; "
                "convert the file again"
            )
        num_tensors = self.count("tensor", MIN_TENSOR_BYTES)
        num_values = self.count("metadata", MIN_KV_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self.string("a metadata key")
            if key in metadata:
                self.fail(f"metadata key {key!r} occurs twice")
            metadata[key] = self.value(key)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"general.alignment is {alignment!r}, not a power of two")
        raw = [self.tensor_fields() for _ in range(num_tensors)]
        sha256 = hashlib.sha256(self.data[: self.position]).hexdigest()
        data_start = -(-self.position // alignment) * alignment
        tensors = self.placed(raw, data_start, alignment)
        return GGUFHeader(self.path, version, metadata, tensors, self.end, sha256)

    def take(self, size: int, what: str) -> int:
        """Move `size` bytes forward. Returns the position where they started."""
        start = self.position
        if size > self.end - start:
            self.fail(f"the file ends inside {what}, {size} bytes wanted, {self.end - start} left")
        self.position = start + size
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def count(self, what: str, item_bytes: int) -> int:
        """Returns a count of items that take at least `item_bytes` each."""
        number = self.u64(f"the {what} count")
        if number > (self.end - self.position) // item_bytes:
            self.fail(f"{what} count {number} is more than the file can contain")
        return number

    def string(self, what: str) -> str:
        size = self.u64(f"the length of {what}")
        start = self.take(size, what)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error}")

    def value(self, key: str) -> Any:
        number = self.u32(f"the type of {key!r}")
        if number == STRING:
            return self.string(f"the value of {key!r}")
        if number == ARRAY:
            return self.array(key)
        code = SCALARS.get(number)
        if code is None:
            self.fail(f"metadata key {key!r} has the unknown value type {number}")
        return struct.unpack_from(
            "<" + code, self.data, self.take(struct.calcsize("<" + code), f"the value of {key!r}")
        )[0]

    def array(self, key: str) -> list[Any]:
        number = self.u32(f"the item type of {key!r}")
        if number == STRING:
            return self.strings(key, self.count(f"{key!r} item", 8))
        code = SCALARS.get(number)
        if code is None:
            self.fail(f"metadata key {key!r} is an array of the unsupported type {number}")
        size = struct.calcsize("<" + code)
        length = self.count(f"{key!r} item", size)
        start = self.take(size * length, f"the value of {key!r}")
        return list(struct.unpack_from(f"<{length}{code}", self.data, start))

    def strings(self, key: str, length: int) -> list[str]:
        """Reads an array of strings. Vocabularies have 10⁵ strings, and this loop takes most of the
        time of a read, so it uses only local names."""
        data = self.data
        position = self.position
        end = self.end
        length_at = _U64.unpack_from
        items: list[bytes] = []
        for index in range(length):
            start = position + 8
            if start > end:
                self.fail(f"the file ends inside item {index} of {key!r}")
            position = start + length_at(data, start - 8)[0]
            if position > end:
                self.fail(f"the file ends inside item {index} of {key!r}")
            items.append(data[start:position])
        self.position = position
        try:
            return [item.decode() for item in items]
        except UnicodeDecodeError as error:
            self.fail(f"an item of {key!r} is not UTF-8: {error}")

    def tensor_fields(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor name")
        num_dims = self.u32(f"the dimensions of tensor {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            self.fail(f"tensor {name!r} has {num_dims} dimensions, 1 to {MAX_DIMS} are possible")
        dims = tuple(self.u64(f"the dimensions of tensor {name!r}") for _ in range(num_dims))
        return (
            name,
            dims,
            self.u32(f"the type of tensor {name!r}"),
            self.u64(f"the offset of tensor {name!r}"),
        )

    def placed(
        self, raw: list[tuple[str, tuple[int, ...], int, int]], data_start: int, alignment: int
    ) -> tuple[GGUFTensor, ...]:
        tensors: dict[str, GGUFTensor] = {}
        for name, dims, number, offset in raw:
            ggml_type = GGML_TYPES.get(number)
            if ggml_type is None:
                value = NEVER_STORED.get(number)
                known = (
                    f"unknown; known are {', '.join(known.name for known in GGML_TYPES.values())}"
                )
                raise ModelError(
                    f"{self.path}: tensor {name!r} has type {number}, which is "
                    + (known if value is None else f"{value}; convert the model again")
                )
            num_elements = 1
            for dim in dims:
                num_elements *= dim
            if num_elements < 1 or dims[0] % ggml_type.block_size:
                self.fail(
                    f"tensor {name!r} of type {ggml_type.name} cannot have the dimensions {dims}"
                )
            if offset % alignment:
                self.fail(
                    f"tensor {name!r} is at offset {offset}, which is not aligned to {alignment}"
                )
            start = data_start + offset
            num_bytes = ggml_type.num_bytes(num_elements)
            if start + num_bytes > self.end:
                self.fail(
                    f"tensor {name!r} should end at byte {start + num_bytes}, past the end of the "
                    "file"
                )
            if name in tensors:
                self.fail(f"tensor {name!r} occurs twice")
            tensors[name] = GGUFTensor(name, dims[::-1], ggml_type, start, num_bytes)
        return tuple(tensors.values())
