"""Matrices of small floats with scales, as most formats store them: one float8 per byte, or two FP4
per byte.

Formats differ in the names of the tensors, and in how many rows and columns share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard.ops.float_codes import E2M1, FloatCodes, float8_values, minifloat_values
from pegboard_weights.cuts import Grid
from pegboard_weights.stored_weight import (
    Form,
    Pieces,
    code_form,
    floats,
    module_of,
    stored_as,
    tensor_of,
)

READING = "small floats 1"
"""Part of the keys of the repack cache. Change it whenever the same tensors are read as other
values."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def float8_rows(
    pieces: Pieces, name: str, scale: Tensor, block: tuple[int, int]
) -> FloatCodes | Tensor:
    """Return the 8-bit floats [rows, columns] of a tensor, of any of the four types, with their
    scales. See `FloatCodes`. Raises ModelError if the tensor is stored as something else."""
    stored = tensor_of(pieces, name, *FLOAT8)
    return packed_if_possible(
        FloatCodes(stored.view(torch.uint8), float8_values(stored.dtype), scale, block)
    )


def packed_if_possible(codes: FloatCodes) -> FloatCodes | Tensor:
    """Return the codes, or the values as floats if kernels do not take codes of this shape. See
    `code_form`."""
    return (
        codes if code_form(codes.codes.shape[1], codes.block[1]) == "code_weight" else codes.dense()
    )


def sextets(packed: Tensor) -> Tensor:
    """Return the 6-bit codes in bytes, four in three of them, the lowest bit first: uint8 [rows,
    3n] → uint8 [rows, 4n]."""
    first, second, third = packed.unflatten(1, (-1, 3)).unbind(2)
    codes = first & 63, first >> 6 | (second & 15) << 2, second >> 4 | (third & 3) << 4, third >> 2
    return torch.stack(codes, dim=-1).flatten(1)


def nibbles(packed: Tensor) -> Tensor:
    """Return the 4-bit codes in bytes, the low half of each byte first: uint8 [rows, n] → uint8
    [rows, 2n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatReader:
    """Reads W[r, c] = code · scale[r // R, c // C] · factor with R, C = block, where a code is a
    float8, FP6 or FP4 (E2M1).

    bits: 8 = `weight` is float8 [rows, columns]; 4 = it is uint8 [rows, columns / 2] (or [rows,
    blocks, bytes of a block]), and the low half of each byte is the even column; 6 = it is uint8
    [rows, columns · 3 / 4], a stream of codes with `mantissa` bits of mantissa. block: None = the
    shape of the scales says whether there is one for the tensor or one per row. weight, scale,
    factor: endings of the tensors' names; of several, the one that the checkpoint has. scale_type:
    "e4m3" and "e8m0" may also be stored as bytes, uint8. is_divisor: the scales are divided by the
    factor.
    """

    bits: int = 8
    mantissa: int = 2
    block: tuple[int, int] | None = None
    weight: tuple[str, ...] = ("weight",)
    scale: tuple[str, ...] = ("weight_scale",)
    factor: str | None = None
    is_divisor: bool = False
    scale_type: Literal["float", "e4m3", "e8m0"] = "float"

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        module = module_of(part)
        rows = part.rows[1] - part.rows[0]
        weight = _first(module, self.weight, available)
        scale = _first(module, self.scale, available)
        shapes: list[tuple[int, ...]] = [(rows, columns * self.bits // 8)]
        if self.bits == 4 and self.block is not None:
            shapes.append((rows, columns // self.block[1], self.block[1] // 2))
        wanted = [
            stored_as(available, weight, *shapes),
            stored_as(available, scale, *self._scale_shapes(rows, columns)),
        ]
        return (
            wanted
            if self.factor is None
            else [*wanted, stored_as(available, f"{module}.{self.factor}", (), (1,))]
        )

    def _scale_shapes(self, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Return the shapes that the scales may have."""
        if self.block is None:
            return [(), (1,), (1, 1), (rows, 1), (rows,)]
        high = -(-rows // self.block[0])
        wide = -(-columns // self.block[1])
        of_one: list[tuple[int, ...]] = [(), (1,)] if high == wide == 1 else []
        return [(high, wide), (high, 1, wide, 1), *of_one]

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return code_form(columns, columns if self.block is None else self.block[1])

    def read(self, part: Part, columns: int, pieces: Pieces) -> FloatCodes | Tensor:
        weight = _stored(part, self.weight, pieces)
        scale = _stored(part, self.scale, pieces)
        assert weight is not None and scale is not None
        codes, values = self._codes(pieces, weight)
        scales = self._scales(pieces, scale)
        if self.block is None:
            block = (1 if scales.numel() > 1 else len(codes), columns)
            scales = scales.reshape(-1, 1)
        else:
            block = self.block
            scales = scales.reshape(-1, -(-columns // block[1]))
        return packed_if_possible(
            FloatCodes(codes, values, scales, block, self._factor(part, pieces))
        )

    def _codes(self, pieces: Pieces, name: str) -> tuple[Tensor, Tensor]:
        if self.bits == 4:
            return nibbles(tensor_of(pieces, name, torch.uint8).flatten(1)), E2M1
        if self.bits == 6:
            return sextets(tensor_of(pieces, name, torch.uint8)), minifloat_values(
                5 - self.mantissa, self.mantissa
            )
        stored = tensor_of(pieces, name, *FLOAT8)
        return stored.view(torch.uint8), float8_values(stored.dtype)

    def _scales(self, pieces: Pieces, name: str) -> Tensor:
        if self.scale_type == "float":
            return floats(pieces, name)
        if self.scale_type == "e4m3":
            return tensor_of(pieces, name, torch.float8_e4m3fn, torch.uint8).view(
                torch.float8_e4m3fn
            )
        return tensor_of(pieces, name, torch.float8_e8m0fnu, torch.uint8).view(torch.float8_e8m0fnu)

    def _factor(self, part: Part, pieces: Pieces) -> float:
        if self.factor is None:
            return 1.0
        name = f"{module_of(part)}.{self.factor}"
        value: float = floats(pieces, name).float().item()
        if self.is_divisor and not 0 < value < math.inf:
            raise ModelError(f"tensor {name} is {value}; this format divides by it")
        return 1 / value if self.is_divisor else value

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return Grid() if self.block is None else Grid(*self.block)

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, *astuple(self)]


def _first(module: str, endings: Sequence[str], available: Mapping[str, TensorEntry]) -> str:
    names = [f"{module}.{ending}" for ending in endings]
    return next((name for name in names if name in available), names[0])


def _stored(part: Part, endings: Sequence[str], pieces: Pieces) -> str | None:
    """Return the name of the piece with one of the endings, or None."""
    names = (f"{module_of(part)}.{ending}" for ending in endings)
    return next((name for name in names if name in pieces), None)
