"""Embeddings in request bodies: base64 of a safetensors file, of an .npy array or of what
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
import zipfile
from typing import Any

import msgspec

from pegboard.data.prompt_embeds import PromptEmbeds, wrong_embeds

MAX_HEADER_BYTES = 64 << 10
MAX_MEMBERS = 64
DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
NUMPY_DTYPES = {"<f4": DTYPES["F32"], "<f2": DTYPES["F16"]}
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
    "torch FloatStorage": DTYPES["F32"],
    "torch HalfStorage": DTYPES["F16"],
    "torch BFloat16Storage": DTYPES["BF16"],
}


def read_tensor(text: str, path: str) -> PromptEmbeds:
    """Return the rows in a text. path: of the field, for errors. Raises RequestError."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise wrong_embeds(path, f"expected base64: {error}") from error
    try:
        if data[:2] == b"PK":
            return msgspec.structs.replace(_torch(data), path=path)
        if data[:6] == b"\x93NUMPY":
            return msgspec.structs.replace(_numpy(data), path=path)
        if data[8:9] == b"{":
            return msgspec.structs.replace(_safetensors(data), path=path)
    except Exception as error:  # bytes that a client chose
        raise wrong_embeds(
            path, f"the bytes cannot be read: {type(error).__name__}: {error!s:.200}"
        ) from error
    raise wrong_embeds(
        path, "expected base64 of a safetensors file, of an .npy array or of what torch.save writes"
    )


def _safetensors(data: bytes) -> PromptEmbeds:
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
    if dtype not in DTYPES:
        raise ValueError(f"expected dtype {', '.join(DTYPES)}, got {dtype!r:.40}")
    rows = data[8 + length :]
    if (start, stop) != (0, len(rows)):
        raise ValueError(
            f"the tensor is at the bytes {start} to {stop}, and {len(rows)} bytes follow the header"
        )
    return _rows(rows, DTYPES[dtype], shape)


def _numpy(data: bytes) -> PromptEmbeds:
    size = 2 if data[6] == 1 else 4
    begin = 8 + size
    length = int.from_bytes(data[8:begin], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {length} bytes, at most {MAX_HEADER_BYTES} are read")
    header = msgspec.convert(
        ast.literal_eval(data[begin : begin + length].decode("latin-1").strip()), NumpyHeader
    )
    if header.descr not in NUMPY_DTYPES:
        raise ValueError(f"expected dtype {', '.join(NUMPY_DTYPES)}, got {header.descr!r:.40}")
    if header.fortran_order:
        raise ValueError(
            "the array is stored column by column; send numpy.ascontiguousarray(array)"
        )
    return _rows(data[begin + length :], NUMPY_DTYPES[header.descr], header.shape)


class NumpyHeader(msgspec.Struct, forbid_unknown_fields=True):
    """The header of an .npy file, which is a Python literal."""

    descr: str
    fortran_order: bool
    shape: tuple[int, ...]


def _torch(data: bytes) -> PromptEmbeds:
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
    if storage not in STORAGES:
        raise ValueError(f"expected a tensor of {', '.join(DTYPES)}, got {storage!r:.60}")
    kind = STORAGES[storage]
    dense = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    if any(
        size != 1 and step != wanted
        for size, step, wanted in zip(shape, strides, dense, strict=True)
    ):
        raise ValueError(
            f"the tensor {list(shape)} has the strides {list(strides)}; send "
            "tensor.contiguous().clone()"
        )
    return _rows(values[offset * kind[1] : (offset + math.prod(shape)) * kind[1]], kind, shape)


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


def _rows(data: bytes, kind: tuple[str, int], shape: tuple[int, ...]) -> PromptEmbeds:
    name, size = kind
    if not (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)) or min(shape) < 0:
        raise ValueError(f"expected the shape [tokens, width], got {list(shape)!s:.80}")
    if len(data) != math.prod(shape) * size:
        raise ValueError(
            f"{list(shape)!s:.80} numbers of {name} do not fill the {len(data)} bytes that are "
            "there"
        )
    return PromptEmbeds(data, name, shape[-2:])
