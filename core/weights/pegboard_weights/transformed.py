"""Weights that were quantized for transformed inputs, where a tensor of the module holds the
transform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard_weights.composed import ColumnScales, MatrixTransform, Transform
from pegboard_weights.cuts import Grid
from pegboard_weights.stored_weight import (
    TRANSFORMED,
    Form,
    Pieces,
    Reader,
    floats,
    module_of,
)


class TransformedReader:
    """Reads a part as another reader does, with the tensor `ending` of its module: scales of the
    columns [columns], or, if size is given, a matrix [size, size] for every `size` columns."""

    def __init__(self, weight: Reader, ending: str, size: int | None = None) -> None:
        self.weight = weight
        self.ending = ending
        self.size = size

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        module = module_of(part)
        if self.size is not None and columns % self.size:
            raise ModelError(
                f"{module} has {columns} columns; {module}.{self.ending} needs a multiple of "
                f"{self.size}"
            )
        shape = (columns,) if self.size is None else (self.size, self.size)
        return [
            *self.weight.tensors(part, columns, available),
            WantedWeight(f"{module}.{self.ending}", shape),
        ]

    def transform(self, part: Part, columns: int, pieces: Pieces) -> Transform | None:
        values = floats(pieces, f"{module_of(part)}.{self.ending}").float()
        return ColumnScales(values) if self.size is None else MatrixTransform(values)

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return TRANSFORMED

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return self.weight.form(part, columns, pieces)

    def read(self, part: Part, columns: int, pieces: Pieces) -> Any:
        return self.weight.read(part, columns, pieces)

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [self.ending, self.size, *self.weight.key(part, pieces)]
