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
from pegboard_weights.config_values import check_config
from pegboard_weights.hf_files import (
    architectures,
    chat_template,
    config_dtype,
    read_config,
    read_optional,
    with_defaults,
)

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.model_source import LocalFiles

SHORT_TYPES = ("bfloat16", "float16")
STANDARD_DEVIATION = 0.02
DRAWN_NUMBERS = 1 << 20
"""A larger tensor repeats this many random numbers, because to draw billions takes minutes."""


class DummyLoader:
    """Every tensor depends only on the seed and the tensor's name. One-dimensional weights (those
    of norms) are 1. All others are drawn from a normal distribution with mean 0. They have 16
    bits if the config says so, as in a checkpoint."""

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

        dtype = checkpoint.dtype if checkpoint.dtype in SHORT_TYPES else "float32"
        for piece in dict.fromkeys(wanted):
            if not piece.shape:
                raise ModelError(
                    f"load format 'dummy' cannot make {piece.name!r}: its layer does not give its "
                    "shape"
                )
            if len(piece.shape) == 1 and piece.name.endswith("weight"):
                data = torch.ones(piece.shape, dtype=getattr(torch, dtype))
            else:
                data = torch.empty(piece.shape, dtype=getattr(torch, dtype))
                self._fill(data.view(-1), piece.name)
            yield WeightPiece(piece.name, dtype, tuple(data.shape), data)

    def _fill(self, numbers: "Tensor", name: str) -> None:
        """Draw the numbers of the tensor of this name, [n]. Only the first ones are drawn; the
        others repeat them."""
        import torch

        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1
        generator = torch.Generator().manual_seed(seed)
        count = min(len(numbers), DRAWN_NUMBERS)
        first = torch.randn(count, generator=generator).mul_(STANDARD_DEVIATION).to(numbers.dtype)
        whole = len(numbers) // max(count, 1) * count
        if whole:
            numbers[:whole].view(-1, count).copy_(first)
        numbers[whole:] = first[: len(numbers) - whole]
