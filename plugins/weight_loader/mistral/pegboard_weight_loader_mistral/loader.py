"""Weight loader `mistral`: describes params.json and consolidated.safetensors in Hugging Face
terms, and streams the tensors from the mapped files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
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
from pegboard_weight_loader_mistral.names import UNUSED, VISION, hugging_face_name
from pegboard_weight_loader_mistral.params import read_params
from pegboard_weights.checkpoint_files import ConfigSource, described
from pegboard_weights.safetensors_files import map_file, read_shards, read_tensors, stamps_of
from pegboard_weights.safetensors_header import Header, read_header

if TYPE_CHECKING:
    from pegboard.interfaces.model_source import LocalFiles

INDEX = "consolidated.safetensors.index.json"


class MistralLoader:
    def __init__(self, options: None, setup: WeightLoaderSetup) -> None:
        pass

    def describe(self, files: "LocalFiles") -> Checkpoint:
        directory = files.root if files.root.is_dir() else files.root.parent
        config = read_params(directory / "params.json")
        headers, stored = _read(directory)
        tensors: dict[str, TensorEntry] = {}
        for key, entry in stored.items():
            if key.startswith(VISION) or UNUSED.fullmatch(key):
                continue
            name = hugging_face_name(key)
            if name is None:
                raise ModelError(
                    f"{directory / entry.file} has the tensor {key!r}, which load format 'mistral' "
                    "does not know; use the model in Hugging Face layout"
                )
            tensors[name] = replace(entry, name=name, key=key)
        source = ConfigSource(directory / "params.json", config, "pairs")
        return described("mistral", files, tensors, stamps_of(directory, headers), source)

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        return read_tensors(checkpoint, wanted, map_file)


def _read(directory: Path) -> tuple[dict[str, Header], dict[str, TensorEntry]]:
    """Return the headers by file, and the tensors under Mistral's names."""
    if (directory / INDEX).is_file():
        return read_shards(directory / INDEX)
    paths = sorted(directory.glob("consolidated*.safetensors"))
    if not paths:
        raise ModelError(f"{directory} contains no weights: expected consolidated.safetensors")
    headers = {path.name: read_header(path) for path in paths}
    tensors: dict[str, TensorEntry] = {}
    for file, header in headers.items():
        if both := tensors.keys() & header.tensors.keys():
            raise ModelError(f"{directory / file} and another file have the tensor {min(both)!r}")
        tensors |= header.tensors
    return headers, tensors
