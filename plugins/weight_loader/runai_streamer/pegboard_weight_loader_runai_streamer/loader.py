"""Weight loaders `runai_streamer` and `runai_streamer_sharded`: files are streamed by several
threads, one file at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard_weights.safetensors_files import blaming, describe_safetensors, read_tensors
from pegboard_weights.sharded_state import ShareLoader

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.model_source import LocalFiles


def stream_file(path: Path, keys: Sequence[str]) -> "Iterator[Tensor]":
    """See `pegboard_weights.safetensors_files.Reader`. The library gives the tensors in the order
    in which they arrive."""
    from runai_model_streamer import SafetensorsStreamer

    with blaming(path), SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path), tensor_names=keys)
        arrivals = streamer.get_tensors()
        early: dict[str, Tensor] = {}
        for key in keys:
            while key not in early:
                arrival = next(arrivals, None)
                if arrival is None:
                    raise ModelError(f"{path}: the tensor {key!r} has not arrived")
                early[arrival[0]] = arrival[1]
            yield early.pop(key)


class StreamerLoader:
    def __init__(self, options: None, setup: WeightLoaderSetup) -> None:
        pass

    def describe(self, files: "LocalFiles") -> Checkpoint:
        return describe_safetensors("runai_streamer", files)

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        return read_tensors(checkpoint, wanted, stream_file)


class ShardedStreamerLoader(ShareLoader):
    format = "runai_streamer_sharded"
    read = staticmethod(stream_file)
