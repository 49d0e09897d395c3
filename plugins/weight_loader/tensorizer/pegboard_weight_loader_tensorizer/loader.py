"""Weight loader `tensorizer`: describes files of tensorizer without the library, and reads them
with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from pegboard_weight_loader_tensorizer.index import read_index
from pegboard_weights.checkpoint_files import by_file, described
from pegboard_weights.safetensors_files import blaming

if TYPE_CHECKING:
    from pegboard.interfaces.model_source import LocalFiles

DEVICE = "cpu"


class TensorizerLoader:
    def __init__(self, options: None, setup: WeightLoaderSetup) -> None:
        pass

    def describe(self, files: "LocalFiles") -> Checkpoint:
        tensors: dict[str, TensorEntry] = {}
        stamps: dict[str, str] = {}
        for path in _paths(files.root):
            index = read_index(path)
            if both := tensors.keys() & index.tensors.keys():
                raise ModelError(f"{path} and another file have the tensor {min(both)!r}")
            tensors |= index.tensors
            stamps[path.name] = index.stamp
        return described("tensorizer", files, tensors, stamps)

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        """Yields tensors that are read one by one."""
        for file, entries in by_file(checkpoint, wanted).items():
            path = checkpoint.path / file
            with blaming(path):
                yield from _read(path, entries)


def _paths(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    paths = sorted(root.glob("*.tensors"))
    if not paths:
        raise ModelError(f"{root} contains no file of tensorizer: expected *.tensors")
    return paths


def _read(path: Path, entries: list[TensorEntry]) -> Iterator[WeightPiece]:
    from tensorizer import TensorDeserializer

    names = {entry.key or entry.name for entry in entries}
    reader = TensorDeserializer(
        str(path), device=DEVICE, lazy_load=True, filter_func=names.__contains__
    )
    with reader:
        for entry in entries:
            data = reader[entry.key or entry.name].detach()
            yield WeightPiece(entry.name, entry.stored, tuple(data.shape), data)
