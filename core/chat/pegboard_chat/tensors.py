"""Tensors in request bodies: base64 of a safetensors file, of an .npy array or of what
torch.save writes.

A request is not trusted. No pickle is run, no library reads a file, and nothing larger than the
body is allocated: each reader compares the shape with the bytes that are there. What torch.save
writes is read without torch: its pickle must consist of exactly the operations of one dense tensor,
and their arguments say where its values are.

Sources: https://github.com/safetensors/safetensors#format,
https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html,
https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import ast
import base64
import io
import math
import pickletools
import re
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from pegboard.data.given_items import MAX_NUMBERS
from pegboard.data.prompt_embeds import PromptEmbeds, wrong_embeds

MAX_HEADER_BYTES = 64 << 10
MAX_MEMBERS = 64
DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
INTEGERS = {"I64": ("int64", 8), "I32": ("int32", 4)}
"""Those of small tensors that say something about an item."""
NUMPY_DTYPES = {"<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32"}
_TENSOR = re.compile(
    r"PROTO 2\nGLOBAL 'torch\._utils _rebuild_tensor_v2'\nMARK\nMARK\nBINUNICODE "
    r"'storage'\nGLOBAL '(?P<storage>torch \w+)'\n"
    r"BINUNICODE '(?P<key>\d+)'\nBINUNICODE '[\w:]+'\nINT \d+\nTUPLE\nBINPERSID\nINT "
    r"(?P<offset>\d+)\n"
    r"(?P<shape>(?:INT \d+\n){1,3})TUPLE[123]\n(?P<strides>(?:INT "
    r"\d+\n){1,3})TUPLE[123]\nNEW(?:TRUE|FALSE)\n"
    r"GLOBAL 'collections OrderedDict'\nEMPTY_TUPLE\nREDUCE\nTUPLE\nREDUCE\nSTOP",
    re.ASCII,
)
"""The operations of the pickle of one tensor."""
_NUMBER = re.compile(r"\d+", re.ASCII)
STORAGES = {
    "torch FloatStorage": "F32",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
    "torch LongStorage": "I64",
    "torch IntStorage": "I32",
}
Kinds = Mapping[str, tuple[str, int]]
"""Safetensors' names of the types that are read → numpy's names, and bytes of a number."""


class Values(NamedTuple):
    """data: the numbers one after the other, little-endian. dtype: numpy's name of their type."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]


def read_tensor(text: str, path: str) -> PromptEmbeds:
    """Return the rows in a text. path: of the field, for errors. Raises RequestError."""
    values = _read(text, path, DTYPES)
    shape = values.shape
    if len(shape) != 2 and not (len(shape) == 3 and shape[0] == 1):
        reason = f"expected the shape [tokens, width], got {list(shape)!s:.80}"
        raise wrong_embeds(path, reason)
    return PromptEmbeds(values.data, values.dtype, shape[-2:], path=path)


def read_integers(text: str, path: str) -> list[tuple[int, ...]]:
    """Return the tensor of integers in a text, [items, numbers] or [numbers], as lines. path: of
    the field, for errors. Raises RequestError."""
    values = _read(text, path, INTEGERS)
    shape = values.shape
    count = math.prod(shape)
    if len(shape) not in (1, 2) or not 0 < count <= MAX_NUMBERS:
        raise wrong_embeds(
            path,
            f"expected whole numbers [items, numbers], at most {MAX_NUMBERS}, got the shape "
            f"{list(shape)!s:.80}",
        )
    letter = "q" if values.dtype == "int64" else "i"
    numbers = struct.unpack(f"<{count}{letter}", values.data)
    return [numbers[first : first + shape[-1]] for first in range(0, count, shape[-1])]


def _read(text: str, path: str, kinds: Kinds) -> Values:
    """Return the tensor in a text. Raises RequestError, which names `path`."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise wrong_embeds(path, f"expected base64: {error}") from error
    try:
        if data[:2] == b"PK":
            return _torch(data, kinds)
        if data[:6] == b"\x93NUMPY":
            return _numpy(data, kinds)
        if data[8:9] == b"{":
            return _safetensors(data, kinds)
    except Exception as error:  # bytes that a client chose
        raise wrong_embeds(
            path, f"the bytes cannot be read: {type(error).__name__}: {error!s:.200}"
        ) from error
    raise wrong_embeds(
        path, "expected base64 of a safetensors file, of an .npy array or of what torch.save writes"
    )


def _safetensors(data: bytes, kinds: Kinds) -> Values:
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {length} bytes, at most {MAX_HEADER_BYTES} are read")
    header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict[str, Any]])
    header.pop("__metadata__", None)
    if len(header) != 1:
        raise ValueError(f"expected one tensor, got {len(header)}")
    ((_, tensor),) = header.items()
    dtype = tensor["dtype"]
    shape = msgspec.convert(tensor["shape"], tuple[int, ...])
    (start, stop) = tensor["data_offsets"]
    if dtype not in kinds:
        raise ValueError(f"expected dtype {', '.join(kinds)}, got {dtype!r:.40}")
    numbers = data[8 + length :]
    if (start, stop) != (0, len(numbers)):
        raise ValueError(
            f"the tensor is at the bytes {start} to {stop}, and {len(numbers)} bytes follow the "
            "header"
        )
    return _values(numbers, kinds[dtype], shape)


def _numpy(data: bytes, kinds: Kinds) -> Values:
    size = 2 if data[6] == 1 else 4
    begin = 8 + size
    length = int.from_bytes(data[8:begin], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {length} bytes, at most {MAX_HEADER_BYTES} are read")
    header = msgspec.convert(
        ast.literal_eval(data[begin : begin + length].decode("latin-1").strip()), NumpyHeader
    )
    kind = kinds.get(NUMPY_DTYPES.get(header.descr, ""))
    if kind is None:
        known = [descr for descr, name in NUMPY_DTYPES.items() if name in kinds]
        raise ValueError(f"expected dtype {', '.join(known)}, got {header.descr!r:.40}")
    if header.fortran_order:
        raise ValueError(
            "the array is stored column by column; send numpy.ascontiguousarray(array)"
        )
    return _values(data[begin + length :], kind, header.shape)


class NumpyHeader(msgspec.Struct, forbid_unknown_fields=True):
    """The header of an .npy file, which is a Python literal."""

    descr: str
    fortran_order: bool
    shape: tuple[int, ...]


def _torch(data: bytes, kinds: Kinds) -> Values:
    if data.count(b"PK\1\2") > MAX_MEMBERS:
        raise ValueError(f"the archive has more than {MAX_MEMBERS} members")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
            raise ValueError("the archive is compressed; send what torch.save writes")
        if members["data.pkl"].file_size > MAX_HEADER_BYTES:
            raise ValueError(
                f"its pickle has {members['data.pkl'].file_size} bytes, at most "
                f"{MAX_HEADER_BYTES} are read"
            )
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise ValueError("its values are not little-endian")
        storage, key, offset, shape, strides = _tensor_of(archive.read(members["data.pkl"]))
        values = archive.read(members[f"data/{key}"])
    kind = kinds.get(STORAGES.get(storage, ""))
    if kind is None:
        raise ValueError(f"expected a tensor of {', '.join(kinds)}, got {storage!r:.60}")
    dense = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    if any(
        size != 1 and step != wanted
        for size, step, wanted in zip(shape, strides, dense, strict=True)
    ):
        raise ValueError(
            f"the tensor {list(shape)} has the strides {list(strides)}; send "
            "tensor.contiguous().clone()"
        )
    return _values(values[offset * kind[1] : (offset + math.prod(shape)) * kind[1]], kind, shape)


def _tensor_of(pickle: bytes) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """Return the storage's class and key, and the offset, shape and strides in it, of the pickle of
    one tensor, which is not run. Raises ValueError for a pickle with other operations."""
    words = []
    for operation, value, _ in pickletools.genops(pickle):
        name = "INT" if operation.name.startswith("BININT") else operation.name
        if not name.endswith("BINPUT"):  # they only number the values
            words.append(name if value is None else f"{name} {value!r}")
    if (match := _TENSOR.fullmatch("\n".join(words))) is None:
        raise ValueError(
            "expected what torch.save writes of one dense tensor; safetensors and .npy are read too"
        )
    storage, key, offset = match.group("storage", "key", "offset")
    shape, strides = (
        tuple(map(int, _NUMBER.findall(match[name]))) for name in ("shape", "strides")
    )
    return storage, key, int(offset), shape, strides


def _values(data: bytes, kind: tuple[str, int], shape: tuple[int, ...]) -> Values:
    name, size = kind
    if min(shape, default=0) < 0:
        raise ValueError(f"expected sizes from 0 on, got the shape {list(shape)!s:.80}")
    if len(data) != math.prod(shape) * size:
        raise ValueError(
            f"{list(shape)!s:.80} numbers of {name} do not fill the {len(data)} bytes that are "
            "there"
        )
    return Values(data, name, shape)
