"""Small tensors of a model, which no other layer holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Build, Layer
from pegboard.layers.build import Holder, PlainTensor
from pegboard.layers.shards import Span


class Parameters(Layer):
    """Plain tensors of the checkpoint module at build.path, by name: parameters["D"]. dtype: torch
    name; None = the compute type. held: the rows of each tensor that this rank holds; None = all.
    They can be read from `bind` on."""

    def __init__(
        self,
        build: Build,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str | None = None,
        held: Sequence[Span] | None = None,
    ) -> None:
        super().__init__(build)
        self.shapes = dict(shapes)
        self.dtype = dtype
        self.held = held

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        self.tensors = {}
        for name, shape in self.shapes.items():
            full = self.build.at(name).path
            held = self.held or [(0, shape[0])]
            count = sum(stop - start for start, stop in held)
            self.tensors[full] = PlainTensor(
                {full: (0, count)}, (count, *shape[1:]), self.build, self.dtype, {full: held}
            )
        return [
            WantedWeight(self.build.at(name).path, shape) for name, shape in self.shapes.items()
        ]

    def accept(self, piece: WeightPiece) -> None:
        self.tensors[piece.name].accept(piece)

    def holders(self) -> list[Holder]:
        return list(self.tensors.values())

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.build.at(name).path].data
