"""Weight loader `safetensors`: describes a Hugging Face directory without torch, and streams its
tensors from mapped files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pegboard.interfaces.weight_loader import (
    Checkpoint,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard_weights.safetensors_files import describe_safetensors, map_file, read_tensors

if TYPE_CHECKING:
    from pegboard.interfaces.model_source import LocalFiles


class SafetensorsLoader:
    def __init__(self, options: None, setup: WeightLoaderSetup) -> None:
        pass

    def describe(self, files: "LocalFiles") -> Checkpoint:
        return describe_safetensors("safetensors", files)

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        return read_tensors(checkpoint, wanted, map_file)
