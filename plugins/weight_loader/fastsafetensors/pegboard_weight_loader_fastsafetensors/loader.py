"""Weight loader `fastsafetensors`: files are read into memory by several threads, one file at a
time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.interfaces.weight_loader import (
    Checkpoint,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard_weights.safetensors_files import blaming, describe_safetensors, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.model_source import LocalFiles

DEVICE = "cpu"


class FastSafetensorsLoader:
    def __init__(self, options: None, setup: WeightLoaderSetup) -> None:
        pass

    def describe(self, files: "LocalFiles") -> Checkpoint:
        return describe_safetensors("fastsafetensors", files)

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        return read_tensors(checkpoint, wanted, read_file)


def read_file(path: Path, keys: Sequence[str]) -> "Iterator[Tensor]":
    """See `pegboard_weights.safetensors_files.Reader`."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    with blaming(path):
        loader = SafeTensorsFileLoader(SingleGroup(), DEVICE, nogds=True)
        try:
            loader.set_tensor_filter(set(keys).__contains__)
            loader.add_filenames({0: [str(path)]})
            buffers = loader.copy_files_to_device()
            try:
                for key in keys:
                    yield buffers.get_tensor(key)
            finally:
                buffers.close()
        finally:
            loader.close()
