"""Weights of which compressed-tensors stores only the values that are not zero
(`sparse-24-bitmask`, `sparse-bitmask`).

    compressed [out, in / 2], or [number of values]   bitmask uint8 [out, in / 8, rounded up]
    shape [2] or [2, 1]

They replace the tensor `weight`, which may hold floats, 8-bit floats or 8-bit integers, row after
row. The lowest bit of a byte of the mask is the first column. All values are held, because no
kernel skips zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight, WeightPiece
from pegboard_weights.cuts import Grid
from pegboard_weights.stored_weight import Form, Pieces, Reader, module_of, tensor_of

FORMATS = ("sparse-24-bitmask", "sparse-bitmask")


class SparseReader:
    """Reads a part with the reader of its dense form. A part that is stored dense is left to that
    reader."""

    def __init__(self, dense: Reader) -> None:
        self.dense = dense

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        wanted = self.dense.tensors(part, columns, available)
        module = module_of(part)
        rows = part.rows[1] - part.rows[0]
        names = [f"{module}.{name}" for name in ("compressed", "shape")]
        if f"{module}.bitmask" not in available:
            return wanted
        mask = WantedWeight(f"{module}.bitmask", (rows, -(-columns // 8)))
        stored = [
            WantedWeight(name, available[name].shape if name in available else ()) for name in names
        ]
        return [*(each for each in wanted if each.name != part.name), mask, *stored]

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return self.dense.form(part, columns, pieces)

    def read(self, part: Part, columns: int, pieces: Pieces) -> Any:
        module = module_of(part)
        if f"{module}.bitmask" not in pieces:
            return self.dense.read(part, columns, pieces)
        rows = part.rows[1] - part.rows[0]
        shape = tensor_of(pieces, f"{module}.shape", torch.int64, torch.int32).flatten().tolist()
        if shape != [rows, columns]:
            raise ModelError(
                f"tensor {module}.shape says {shape}; {part.name} has the shape {[rows, columns]} "
                "in this model"
            )
        mask = tensor_of(pieces, f"{module}.bitmask", torch.uint8)
        kept = (mask[..., None] >> torch.arange(8) & 1).flatten(1)[:, :columns].bool()
        values = pieces[f"{module}.compressed"].data
        if not isinstance(values, Tensor) or values.numel() != int(kept.sum()):
            raise ModelError(
                f"tensor {module}.compressed does not have the {int(kept.sum())} values that its "
                "bitmask marks"
            )
        unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
            values.element_size()
        ]
        dense = torch.zeros(rows, columns, dtype=unsigned)
        dense[kept] = values.contiguous().flatten().view(unsigned)
        piece = WeightPiece(
            part.name,
            pieces[f"{module}.compressed"].stored,
            (rows, columns),
            dense.view(values.dtype),
        )
        return self.dense.read(part, columns, {**pieces, part.name: piece})

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return self.dense.grid(part, columns, pieces)

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [f"{module_of(part)}.bitmask" in pieces, *self.dense.key(part, pieces)]
