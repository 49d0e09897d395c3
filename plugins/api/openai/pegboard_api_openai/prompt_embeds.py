"""Prompts as embeddings in request bodies: base64 of a safetensors file, of an .npy array or of what torch.save writes.

A request is not trusted: pickles are read only by torch's reader of plain tensors (weights_only), and only if their archive is
not compressed and small enough.

Sources: https://github.com/safetensors/safetensors#format, https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import base64
import io
import math
import zipfile
from typing import Any

import msgspec

from pegboard.data.request import PromptEmbeds
from pegboard.errors import PegboardError, RequestError

MAX_PICKLE_BYTES = 64 << 20
MAX_HEADER_BYTES = 64 << 10
DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}


def read_embeds(value: str | list[str] | None, *, is_on: bool) -> list[PromptEmbeds]:
    """Return the prompts of the field `prompt_embeds`. Raises RequestError, also if it is given although it is off."""
    if value is None:
        return []
    if not is_on:
        raise _refused("prompt_embeds", "prompts as embeddings are off; start the server with --enable-prompt-embeds")
    if isinstance(value, str):
        return [_read(value, "prompt_embeds")]
    return [_read(each, f"prompt_embeds[{index}]") for index, each in enumerate(value)]


def _read(text: str, path: str) -> PromptEmbeds:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise _refused(path, f"expected base64: {error}") from error
    try:
        if data[:2] == b"PK":
            return PromptEmbeds.of(_torch(data))
        if data[:6] == b"\x93NUMPY":
            return PromptEmbeds.of(_numpy(data))
        if data[8:9] == b"{":
            return _safetensors(data)
    except PegboardError as error:
        raise _refused(path, str(error).removeprefix("prompt_embeds: ")) from error
    except Exception as error:  # readers of other libraries, with bytes that a client chose
        raise _refused(path, f"the bytes cannot be read: {type(error).__name__}: {error!s:.200}") from error
    raise _refused(path, "expected base64 of a safetensors file, of an .npy array or of what torch.save writes")


def _safetensors(data: bytes) -> PromptEmbeds:
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {length} bytes, at most {MAX_HEADER_BYTES} are read")
    header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict[str, Any]])
    header.pop("__metadata__", None)
    if len(header) != 1:
        raise ValueError(f"expected one tensor, got {len(header)}")
    ((_, tensor),) = header.items()
    dtype, shape, (start, stop) = tensor["dtype"], msgspec.convert(tensor["shape"], tuple[int, ...]), tensor["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"expected dtype {', '.join(DTYPES)}, got {dtype!r:.40}")
    name, size = DTYPES[dtype]
    rows = data[8 + length :]
    if min((*shape, 0)) < 0 or (start, stop) != (0, len(rows)) or len(rows) != math.prod(shape) * size:
        raise ValueError(f"{list(shape)} numbers of {name} do not fill the {len(rows)} bytes after the header")
    return PromptEmbeds(rows, name, shape)


def _numpy(data: bytes) -> Any:
    try:
        import numpy as np
    except ImportError as error:
        raise ValueError("this server has no numpy; send safetensors") from error

    return np.load(io.BytesIO(data), allow_pickle=False)


def _torch(data: bytes) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ValueError("this server has no torch; send safetensors") from error

    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(f"what torch.save wrote has {len(data)} bytes, at most {MAX_PICKLE_BYTES} are read; send safetensors")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
    stored = sum(member.file_size for member in members)
    if any(member.compress_type != zipfile.ZIP_STORED for member in members) or stored > len(data):
        raise ValueError("the archive is compressed; send what torch.save writes")
    tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"expected one dense tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > len(data):
        raise ValueError(f"the tensor {list(tensor.shape)} has more values than bytes were sent")
    return tensor


def _refused(path: str, reason: str) -> RequestError:
    return RequestError(f"{path}: {reason}", parameter="prompt_embeds")
