"""The index files of a folder with the shares of ranks. This module does not import torch.

`sharded_state.json` describes the checkpoint. `shares-rank-0.json` and so on say which tensors each
rank has saved, and in which of its safetensors files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from pegboard.data.checkpoint_file import read_object
from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Box

DESCRIPTION = "sharded_state.json"
MAX_INDEX_BYTES = 256 * 1024 * 1024
T = TypeVar("T")
Size = Annotated[int, msgspec.Meta(ge=0)]


class Description(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of `Checkpoint` that all ranks have in common. ranks: how many have saved a
    share."""

    ranks: Size
    config: dict[str, Any]
    architectures: list[str]
    tokenizer_format: str
    tokenizer_data: dict[str, Any]
    quantization: dict[str, Any] | None
    dtype: str | None
    rope_style: str
    chat_template: str | None
    generation_config: dict[str, Any]
    digest: str


class SavedTensor(msgspec.Struct, forbid_unknown_fields=True):
    """shape, num_bytes: of the whole tensor. stored: see `TensorEntry`. boxes: the parts that are
    saved, each under its number; [] = all. is_raw: its blocks are saved as bytes."""

    shape: list[Size]
    stored: str
    num_bytes: Size
    boxes: list[Box]
    is_raw: bool
    file: str = ""

    def keys(self, name: str) -> list[str]:
        """Return the names of what is saved of the tensor, in its file."""
        return [f"{name}#{i}" for i in range(len(self.boxes))] or [name]


class Share(msgspec.Struct, forbid_unknown_fields=True):
    """What a rank has saved. layout: see `WeightLoaderSetup`. tensors: in file order."""

    layout: str
    tensors: dict[str, SavedTensor]


def share_file(rank: int) -> str:
    return f"shares-rank-{rank}.json"


def read_description(folder: Path) -> Description:
    """Raises ModelError if the folder has none, or a damaged one."""
    if not (folder / DESCRIPTION).is_file():
        raise ModelError(
            f"{folder} has no {DESCRIPTION}; load format 'sharded_state' reads what "
            "LLM.save_sharded_state has written"
        )
    return _read(folder / DESCRIPTION, Description)


def write_index(path: Path, index: Description | Share) -> None:
    """Numbers may be infinite, as in configs."""
    path.write_text(json.dumps(msgspec.to_builtins(index)), encoding="utf-8")


def read_share(folder: Path, rank: int) -> Share:
    """Raises ModelError if the share is missing or damaged."""
    path = folder / share_file(rank)
    share = _read(path, Share)
    for name, tensor in share.tensors.items():
        file = tensor.file
        if Path(file).name != file or "\0" in file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{path} names the file {file!r}; expected a .safetensors file next to it"
            )
        if not all(_fits(box, tensor.shape) for box in tensor.boxes):
            raise ModelError(
                f"{path} has parts {tensor.boxes} of {name!r}, which has shape {tensor.shape}"
            )
        if tensor.boxes and tensor.is_raw and tensor.num_bytes % tensor.shape[0]:
            raise ModelError(
                f"{path}: {name!r} has {tensor.num_bytes} bytes, which {tensor.shape[0]} rows "
                "cannot have"
            )
        if tensor.num_bytes > 8 * math.prod(tensor.shape):
            raise ModelError(
                f"{path}: {name!r} has {tensor.num_bytes} bytes, too many for {tensor.shape}"
            )
    return share


def _fits(box: Box, shape: list[int]) -> bool:
    return len(box) == len(shape) == 2 and all(
        0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.convert(read_object(path, MAX_INDEX_BYTES), kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path} is damaged: {error}; save the shares again") from error
