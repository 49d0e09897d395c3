"""What a request carries besides tokens and parameters. Without numpy, which a process that only serves does not load."""

from __future__ import annotations

import msgspec


class Blob(msgspec.Struct):
    """A tensor as bytes: dtype by its torch name (numpy has no bfloat16), C order."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]


class AdapterRef(msgspec.Struct, frozen=True):
    """A LoRA adapter on local disk. `lora_id` is unique per engine; `digest` of the files enters block hashes."""

    lora_id: int
    name: str
    path: str
    digest: str = ""


class MediaRef(msgspec.Struct):
    """One image, video or audio item of a prompt: content hash, first placeholder position, number of placeholder tokens;
    `data` is None when the worker is known to hold the encoded item."""

    hash: str
    offset: int
    num_tokens: int
    data: Blob | None = None
