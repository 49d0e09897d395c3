"""Weight loader `dummy`: makes random weights from a config alone, for tests and for measuring
speed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    TokenizerPayload,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard_weight_loader_safetensors.config_values import check_config
from pegboard_weight_loader_safetensors.hf_files import (
    architectures,
    chat_template,
    config_dtype,
    read_config,
    read_optional,
    with_defaults,
)

if TYPE_CHECKING:
    from pegboard.interfaces.model_source import LocalFiles

STANDARD_DEVIATION = 0.02


class DummyLoader:
    """Every tensor depends only on the seed and the tensor's name. One-dimensional weights (those
    of norms) are 1. All others are drawn from a normal distribution with mean 0."""

    def __init__(self, options: None, setup: WeightLoaderSetup) -> None:
        self.seed = setup.seed

    def describe(self, files: "LocalFiles") -> Checkpoint:
        directory = files.root if files.root.is_dir() else files.root.parent
        config = read_config(directory)
        check_config(directory / "config.json", config, ())
        if config.get("quantization_config"):
            raise ModelError(
                f"{directory / 'config.json'} describes a quantized model, but load format "
                "'dummy' makes only plain weights. Remove quantization_config from a copy of the "
                "config"
            )
        return Checkpoint(
            format="dummy",
            path=directory,
            config=with_defaults(config),
            architectures=architectures(config, directory),
            tensors={},
            tokenizer=TokenizerPayload("hf", directory=directory),
            dtype=config_dtype(config),
            chat_template=chat_template(directory),
            generation_config=read_optional(directory / "generation_config.json"),
            digest="sha256:"
            + hashlib.sha256(
                json.dumps(["dummy", self.seed, config], sort_keys=True).encode()
            ).hexdigest(),
        )

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        import torch

        for piece in dict.fromkeys(wanted):
            if not piece.shape:
                raise ModelError(
                    f"load format 'dummy' cannot make {piece.name!r}: its layer does not give its "
                    "shape"
                )
            if len(piece.shape) == 1 and piece.name.endswith("weight"):
                data = torch.ones(piece.shape)
            else:
                seed = (
                    int.from_bytes(
                        hashlib.sha256(f"{self.seed}:{piece.name}".encode()).digest()[:8], "little"
                    )
                    >> 1
                )
                data = torch.randn(piece.shape, generator=torch.Generator().manual_seed(seed)).mul_(
                    STANDARD_DEVIATION
                )
            yield WeightPiece(piece.name, "float32", tuple(data.shape), data)
