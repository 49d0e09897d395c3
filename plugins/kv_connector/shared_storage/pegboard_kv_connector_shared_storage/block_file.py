"""The content of a block's file: a safetensors file (https://huggingface.co/docs/safetensors) whose
header is known before it is read.

    8 bytes: length of the header | header: JSON, padded with spaces | the layers' tensors, one
    after the other

The header names the identity of the engine, the rank, the group, the block, and a CRC-32 of the
tensors. A reader makes the header that the file must have and compares the bytes. Nothing of a file
is interpreted, so no file can mislead a parser.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

import torch

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Types as safetensors names them."""

_HASH = "#block"
_CHECKSUM = "#crc32"
"""Stand for what differs from file to file."""


class BlockHeader:
    """The headers of the files of one KV group. parts: (name, type, shape) of the tensors of a
    block, in order. num_bytes: of a header, together with its length."""

    def __init__(
        self,
        identity: str,
        rank: int,
        group: int,
        parts: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        hash_bytes: int,
    ) -> None:
        about = {
            "format": "pegboard-kv-1",
            "identity": identity,
            "rank": str(rank),
            "group": str(group),
        }
        header: dict[str, object] = {"__metadata__": {**about, "block": _HASH, "crc32": _CHECKSUM}}
        start = 0
        for name, dtype, shape in parts:
            end = start + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [start, end]}
            start = end
        before, rest = json.dumps(header, separators=(",", ":")).split(_HASH)
        between, after = rest.split(_CHECKSUM)
        length = len(before) + 2 * hash_bytes + len(between) + 8 + len(after)
        padding = -length % 8
        self._before = (length + padding).to_bytes(8, "little") + before.encode()
        self._between = between.encode()
        self._after = after.encode() + b" " * padding
        self.num_bytes = 8 + length + padding

    def encode(self, block_hash: bytes, content: memoryview) -> bytes:
        """Return the header of a block's file."""
        checksum = b"%08x" % zlib.crc32(content)
        return self._before + block_hash.hex().encode() + self._between + checksum + self._after
