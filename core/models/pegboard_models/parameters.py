"""Small tensors of a model, which no other layer holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Build, Layer
from pegboard.layers.build import Holder, PlainTensor


class Parameters(Layer):
    """Plain tensors of the checkpoint module at build.path, by name: parameters["D"]. dtype: torch
    name; None = the compute type. They can be read from `bind` on."""

    def __init__(
        self, build: Build, shapes: Mapping[str, tuple[int, ...]], dtype: str | None = None
    ) -> None:
        super().__init__(build)
        self.shapes = dict(shapes)
        self.dtype = dtype

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        self.tensors = {}
        for name, shape in self.shapes.items():
            full = f"{self.build.path}.{name}"
            self.tensors[full] = PlainTensor({full: (0, shape[0])}, shape, self.build, self.dtype)
        return [
            WantedWeight(name, tuple(tensor.data.shape)) for name, tensor in self.tensors.items()
        ]

    def accept(self, piece: WeightPiece) -> None:
        self.tensors[piece.name].accept(piece)

    def holders(self) -> list[Holder]:
        return list(self.tensors.values())

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{self.build.path}.{name}"].data
