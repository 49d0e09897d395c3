"""How compressed-tensors stores the weights of linear layers.

    pack-quantized   weight_packed int32 [out, in · bits / 32]   weight_scale [out, groups]
    weight_zero_point int32
                     [out · bits / 32, groups]   weight_g_idx [in]   weight_shape [2]
    int-quantized    weight int8 [out, in]   weight_scale, weight_zero_point int8 [out, groups],
    [out, 1] or [1] float-quantized  weight float8 [out, in]   weight_scale [out, groups], [out /
    128, in / 128], [out, 1] or [1] nvfp4-pack-quantized   weight_packed uint8 [out, in / 2]
    weight_scale float8 [out, in / 16]   weight_global_scale [1] mxfp4-pack-quantized
    weight_packed uint8 [out, in / 2]   weight_scale uint8 (exponents) [out, in / 32]
    mxfp6-pack-quantized   weight_packed uint8 [out, in · 3 / 4] (E2M3)   weight_scale as for mxfp4
    mxfp8-quantized  weight float8 [out, in]   weight_scale as for mxfp4 marlin-24
    weight_packed, meta, scale_packed: see `pegboard_weights.marlin_24`

Floats are multiplied with their scale, which weight_global_scale divides. Integers mean
W[r, c] = weight_scale[r, g] · (code[r, c] − weight_zero_point[r, g]). Codes and zero points are
signed. Packed ones are stored with 2^(bits − 1) added, as a stream of bits along the columns
(codes) or the rows (zero points). `naive-quantized` is `int-quantized` or `float-quantized`,
depending on the type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Cut, Part
from pegboard.interfaces.weight_loader import Box, TensorEntry, WantedWeight
from pegboard.ops.blocks import Blocks
from pegboard_weights.asked_rounding import AskedRounding
from pegboard_weights.cuts import Grid
from pegboard_weights.grouped import (
    block_form,
    column_groups,
    group_grid,
    grouped_rows,
    signed_rows,
)
from pegboard_weights.marlin_24 import Marlin24Reader
from pegboard_weights.packed_integers import unpack
from pegboard_weights.small_floats import FloatReader
from pegboard_weights.stored_weight import (
    Form,
    Pieces,
    Reader,
    module_of,
    scales_of,
    stored_as,
    tensor_of,
    words_of,
)

READING = "compressed-tensors 1"
"""Part of the keys of the repack cache. Change it whenever the same tensors are read as other
values."""


HAVE_GROUPS = ("group", "tensor_group")
"""The strategies with a scale per group of columns."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """What `weights` of a group says. group_size: columns per scale, for the strategies that have
    groups. block: rows and columns per scale, for the strategy block. inputs: how activations are
    to be rounded."""

    format: str
    type: str
    bits: int
    strategy: str
    group_size: int
    is_symmetric: bool
    block: tuple[int, int] = (1, 1)
    inputs: AskedRounding | None = None

    def group(self, columns: int) -> int:
        """Return the number of columns per scale."""
        return self.group_size if self.strategy in HAVE_GROUPS else columns


class SchemeReader:
    """What the readers of integers share."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, *astuple(self.scheme)[:-1]]

    def scale_shapes(self, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Return the shapes that a scale or zero point may have."""
        if self.scheme.strategy == "tensor":
            return [(1,), ()]
        groups = columns // self.scheme.group(columns)
        return [(rows, groups), (rows,)] if groups == 1 else [(rows, groups)]


class IntReader(SchemeReader):
    """int-quantized: one code per byte."""

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        module = module_of(part)
        rows = part.rows[1] - part.rows[0]
        names = (
            ["weight_scale"] if self.scheme.is_symmetric else ["weight_scale", "weight_zero_point"]
        )
        shapes = self.scale_shapes(rows, columns)
        return [
            WantedWeight(part.name, (rows, columns)),
            *(stored_as(available, f"{module}.{name}", *shapes) for name in names),
        ]

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return block_form(columns, self.scheme.group(columns))

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return group_grid(columns, self.scheme.group(columns))

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | Tensor:
        module = module_of(part)
        zero = None if self.scheme.is_symmetric else f"{module}.weight_zero_point"
        group = self.scheme.group(columns)
        return signed_rows(
            pieces, part.name, f"{module}.weight_scale", zero, self.scheme.bits, group
        )


class PackedReader(SchemeReader):
    """pack-quantized: codes in 32-bit words."""

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        module = module_of(part)
        rows = part.rows[1] - part.rows[0]
        bits = self.scheme.bits
        groups = columns // self.scheme.group(columns)
        wanted = [
            WantedWeight(f"{module}.weight_packed", (rows, -(-columns * bits // 32))),
            stored_as(available, f"{module}.weight_scale", *self.scale_shapes(rows, columns)),
        ]
        if not self.scheme.is_symmetric:
            wanted.append(
                WantedWeight(f"{module}.weight_zero_point", (-(-rows * bits // 32), groups))
            )
        optional = [
            WantedWeight(f"{module}.weight_g_idx", (columns,), is_first=True),
            WantedWeight(f"{module}.weight_shape", (2,)),
        ]
        return [*wanted, *(weight for weight in optional if weight.name in available)]

    def boxes(self, weight: WantedWeight, cut: Cut) -> tuple[Box, ...]:
        is_codes = weight.name.endswith(".weight_packed")
        return ((cut.rows, words_of(cut.columns, self.scheme.bits)),) if is_codes else ()

    def _groups(self, part: Part, columns: int, pieces: Pieces) -> Tensor | None:
        return column_groups(
            pieces, f"{module_of(part)}.weight_g_idx", columns, self.scheme.group(columns)
        )

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return block_form(columns, self.scheme.group(columns), self._groups(part, columns, pieces))

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return group_grid(columns, self.scheme.group(columns), self._groups(part, columns, pieces))

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | Tensor:
        module = module_of(part)
        rows = part.rows[1] - part.rows[0]
        bits = self.scheme.bits
        shape = f"{module}.weight_shape"
        if shape in pieces and tensor_of(pieces, shape, torch.int32, torch.int64).tolist() != [
            rows,
            columns,
        ]:
            raise ModelError(
                f"tensor {shape} does not say ({rows}, {columns}), which is the shape of "
                f"{part.name} in this model"
            )
        codes = unpack(tensor_of(pieces, f"{module}.weight_packed", torch.int32), bits, 1)[
            :, :columns
        ]
        zero: int | Tensor = 1 << (bits - 1)
        if not self.scheme.is_symmetric:
            zero = unpack(tensor_of(pieces, f"{module}.weight_zero_point", torch.int32), bits, 0)[
                :rows
            ]
        scale = scales_of(pieces, f"{module}.weight_scale").reshape(rows, -1)
        return grouped_rows(
            codes,
            bits,
            scale,
            zero,
            self.scheme.group(columns),
            self._groups(part, columns, pieces),
        )


def _float8(scheme: Scheme) -> FloatReader:
    groups = (1, scheme.group_size) if scheme.strategy == "group" else None
    return FloatReader(block=scheme.block if scheme.strategy == "block" else groups)


def _nvfp4(scheme: Scheme) -> FloatReader:
    return FloatReader(
        bits=4,
        block=(1, scheme.group_size),
        weight=("weight_packed",),
        factor="weight_global_scale",
        is_divisor=True,
        scale_type="e4m3",
    )


def _mxfp4(scheme: Scheme) -> FloatReader:
    return FloatReader(
        bits=4, block=(1, scheme.group_size), weight=("weight_packed",), scale_type="e8m0"
    )


def _mxfp6(scheme: Scheme) -> FloatReader:
    return FloatReader(
        bits=6,
        mantissa=3,
        block=(1, scheme.group_size),
        weight=("weight_packed",),
        scale_type="e8m0",
    )


def _mxfp8(scheme: Scheme) -> FloatReader:
    return FloatReader(block=(1, scheme.group_size), scale_type="e8m0")


def _marlin_24(scheme: Scheme) -> Marlin24Reader:
    size = scheme.group_size if scheme.strategy in HAVE_GROUPS else -1
    return Marlin24Reader(scheme.bits, size, ("weight_packed", "meta", "scale_packed"))


@dataclass(frozen=True, slots=True)
class Format:
    """bits, strategies: the values of a scheme that can be read. make: returns the reader of a
    scheme."""

    make: Callable[[Scheme], Reader]
    bits: Collection[int]
    strategies: tuple[str, ...]


_BYTES = Format(IntReader, range(2, 9), ("tensor", "channel", "group"))
_FLOAT8 = Format(_float8, (8,), ("tensor", "channel", "group", "block"))
FORMATS: Mapping[tuple[str, str], Format] = {
    ("pack-quantized", "int"): Format(PackedReader, range(2, 9), ("channel", "group")),
    ("marlin-24", "int"): Format(_marlin_24, (4, 8), ("channel", "group")),
    ("int-quantized", "int"): _BYTES,
    ("naive-quantized", "int"): _BYTES,
    ("float-quantized", "float"): _FLOAT8,
    ("naive-quantized", "float"): _FLOAT8,
    ("nvfp4-pack-quantized", "float"): Format(_nvfp4, (4,), ("tensor_group",)),
    ("mxfp4-pack-quantized", "float"): Format(_mxfp4, (4,), ("group",)),
    ("mxfp6-pack-quantized", "float"): Format(_mxfp6, (6,), ("group",)),
    ("mxfp8-quantized", "float"): Format(_mxfp8, (8,), ("group",)),
}
"""By format and type of the weights."""
