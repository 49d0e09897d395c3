"""Weight loader `safetensors`: describes a Hugging Face directory without torch, and streams its
tensors from mapped files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard_weights.checkpoint_files import by_file
from pegboard_weights.safetensors_files import describe_safetensors

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
        """Yields views of the mapped files."""
        from safetensors import SafetensorError, safe_open

        for file, entries in by_file(checkpoint, wanted).items():
            path = checkpoint.path / file
            try:
                with safe_open(path, framework="pt") as opened:
                    for entry in entries:
                        data = opened.get_tensor(entry.key or entry.name)
                        yield WeightPiece(entry.name, entry.stored, tuple(data.shape), data)
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} has changed since it was described, or is damaged: {error}"
                ) from error
