"""Weight loader `pt`: describes files of torch.save without torch, and reads them with
`torch.load(weights_only=True)`."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    TensorEntry,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard_weight_loader_pt.pickled_tensors import read_state_file
from pegboard_weights.checkpoint_files import by_file, described, read_weight_map

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.model_source import LocalFiles

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"
ENDINGS = (".bin", ".pt", ".pth")
NO_WEIGHTS = {
    "optimizer.bin",
    "optimizer.pt",
    "scaler.pt",
    "scheduler.pt",
    "training_args.bin",
}
"""Files that trainers write next to the weights."""


class PickledLoader:
    def __init__(self, options: None, setup: WeightLoaderSetup) -> None:
        pass

    def describe(self, files: "LocalFiles") -> Checkpoint:
        return describe_pickled("pt", files)

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        """Yields views of the mapped files."""
        for file, entries in by_file(checkpoint, wanted).items():
            state = load_state(checkpoint.path / file)
            for entry in entries:
                data = tensor_of(checkpoint.path / file, state, entry)
                yield WeightPiece(entry.name, entry.stored, entry.shape, data)


def describe_pickled(format: str, files: "LocalFiles") -> Checkpoint:
    """Return the description of a directory with files of torch.save, or of one such file next to
    its config.json. format: the name of the loader. Raises ModelError."""
    paths = _paths(files.root)
    tensors: dict[str, TensorEntry] = {}
    for path in paths:
        for name, entry in read_state_file(path).tensors.items():
            if name in tensors:
                raise ModelError(
                    f"{path} and {tensors[name].file} both have the tensor {name!r}. Files that "
                    "each hold a part of every tensor (consolidated.00.pth, …) have to be "
                    "converted to Hugging Face layout first"
                )
            tensors[name] = entry
    stamps = {path.name: stamp_of(path) for path in paths}
    return described(format, files, tensors, stamps)


def stamp_of(path: Path) -> str:
    """Return the size of a file in bytes and its time of modification, as text."""
    facts = path.stat()
    return f"{facts.st_size}-{facts.st_mtime_ns}"


def _paths(root: Path) -> list[Path]:
    """Return the weight files of a directory."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ModelError(f"there is no model directory {root}")
    if (root / INDEX).is_file():
        files = read_weight_map(root / INDEX, ENDINGS).values()
        return [root / file for file in sorted(set(files))]
    if (root / SINGLE).is_file():
        return [root / SINGLE]
    for ending in ENDINGS:
        paths = sorted(
            path
            for path in root.glob(f"*{ending}")
            if path.name not in NO_WEIGHTS and not path.name.startswith("adapter_")
        )
        if paths:
            return paths
    raise ModelError(
        f"{root} contains no weights of torch.save: expected {SINGLE}, or {INDEX} and its shards, "
        f"or files that end in {', '.join(ENDINGS)}"
    )


def load_state(path: Path) -> Mapping[str, "Tensor"]:
    """Return the tensors of a file, which are views of the mapped file if it is new enough. Raises
    ModelError."""
    import torch

    is_archive = read_state_file(path).is_archive
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ModelError(
            f"{path} has changed since it was described, or is damaged: {error!s:.300}"
        ) from error
    return state


def tensor_of(path: Path, state: Mapping[str, "Tensor"], entry: TensorEntry) -> "Tensor":
    """Return one tensor. Raises ModelError if it is not the one that was described."""
    data = state.get(entry.key or entry.name)
    if data is None or tuple(data.shape) != entry.shape or str(data.dtype)[6:] != entry.stored:
        raise ModelError(f"{path} has changed since it was described: look at {entry.name!r}")
    return data.detach()
