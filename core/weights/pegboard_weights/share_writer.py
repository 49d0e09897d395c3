"""Writes safetensors files whose tensors are views of other files, without copying them first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pegboard_weights.safetensors_header import TORCH_NAMES

CODES = {name: code for code, name in TORCH_NAMES.items()}


class ShareWriter:
    """The files of one rank. A part is written as soon as the next tensor would exceed
    `max_bytes`."""

    def __init__(self, folder: Path, pattern: str, rank: int, max_bytes: int | None) -> None:
        self.folder = folder
        self.pattern = pattern
        self.rank = rank
        self.max_bytes = max_bytes
        self.part = 0
        self.num_bytes = 0
        self.contents: dict[str, Any] = {}

    @property
    def file(self) -> str:
        """The name of the part that is filled."""
        numbers = {"{rank}": str(self.rank), "{part}": str(self.part)}
        name = self.pattern
        for field, number in numbers.items():
            name = name.replace(field, number)
        return name

    def add(self, contents: Mapping[str, Any]) -> str:
        """Add tensors or arrays of bytes, which stay together. Return the name of their file."""
        size = sum(content.nbytes for content in contents.values())
        if self.max_bytes is not None and self.contents and self.num_bytes + size > self.max_bytes:
            self.close()
        self.contents |= contents
        self.num_bytes += size
        return self.file

    def close(self) -> None:
        """Write the part that is filled. Later tensors are in the next one."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, content in self.contents.items():
            stop = start + content.nbytes
            dtype = CODES[str(content.dtype).removeprefix("torch.")]
            offsets = [start, stop]
            header[name] = {
                "dtype": dtype,
                "shape": [*content.shape],
                "data_offsets": offsets,
            }
            start = stop
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (self.folder / self.file).open("xb") as file:
            file.write(len(encoded).to_bytes(8, "little"))
            file.write(encoded)
            for content in self.contents.values():
                file.write(_bytes_of(content))
        self.contents = {}
        self.num_bytes = 0
        self.part += 1


def _bytes_of(content: Any) -> memoryview:
    if not isinstance(content, np.ndarray):
        import torch

        content = content.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(content).data
