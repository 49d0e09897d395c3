"""HQQ (Badri and Shaji 2023): integers of 1 to 8 bits with a scale and a zero point, both floats,
per group of weights.

    W_q uint8 or int32   scale, zero   packing (a text, optional); in some checkpoints after "meta."

W = (code − zero) · scale. The matrix is reshaped to [groups, group_size] (axis 1) or [group_size,
groups] (axis 0), and quantized along this axis. W_q holds `n` slices of the reshaped matrix, one
above the other, in one byte or word: the first slice in its highest bits. 3 bits are packed in
words of 32 bits, 10 slices each, with rows of zeros at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard.ops.blocks import Blocks
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.cuts import Grid
from pegboard_weights.grouped import block_form, group_grid, grouped_rows, scales_of_rows
from pegboard_weights.stored_weight import (
    AnyLayer,
    Form,
    FormatMethod,
    Pieces,
    Reader,
    floats,
    module_of,
    stored_as,
)

READING = "hqq 1"
"""Part of the keys of the repack cache. Change it whenever the same tensors are read as other
values."""

METHOD = "HQQ"
SLICES = {
    8: ("8bit_u8", 1),
    4: ("4bit_u8", 2),
    3: ("3bit_32", 10),
    2: ("2bit_u8", 4),
    1: ("1bit_u8", 8),
}
"""Bits → the name of the packing, and how many slices are in one byte or word."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """group_size: None = the whole row (axis 1) or column (axis 0)."""

    bits: int
    group_size: int | None
    axis: int


class HQQ(FormatMethod):
    """`quant_config` is one scheme for all linear layers, or has a scheme for each name of a layer
    ("self_attn.q_proj")."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, METHOD)
        self.skipped = config.names("skip_modules")
        quant_config = config.part("quant_config")
        if quant_config is None:
            raise config.error("quant_config", None, "needs an object")
        if "weight_quant_params" in quant_config.values:
            self.schemes = {"": _scheme(quant_config)}
        else:
            self.schemes = {
                name: _scheme(part)
                for name in quant_config.values
                if (part := quant_config.part(name)) is not None
            }

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        if isinstance(layer, EmbeddingLayer) or layer.is_head or matches(module, self.skipped):
            return None
        name = next((name for name in self.schemes if not name or matches(module, [name])), None)
        return None if name is None else HQQReader(self.schemes[name])


def _scheme(config: QuantConfig) -> Scheme:
    weight = config.part("weight_quant_params")
    if weight is None:
        raise config.error("weight_quant_params", None, "needs an object")
    for name in ("scale_quant_params", "zero_quant_params"):
        if config.values.get(name) is not None:
            raise config.error(
                name,
                config.values[name],
                "does not support scales and zero points that are quantized themselves",
            )
    size = None if weight.values.get("group_size", 64) is None else weight.size("group_size", 64)
    if not weight.flag("channel_wise", True):
        raise weight.error("channel_wise", False, "needs true")
    return Scheme(
        weight.one_of("nbits", tuple(SLICES), 4),
        None if size == -1 else size,
        weight.one_of("axis", (0, 1), 1),
    )


class HQQReader:
    """Axis 1 is read as Blocks. Groups of axis 0 are spread over rows, so these weights are held as
    floats."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.prefix = ""

    def _shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the reshaped matrix."""
        size = self.scheme.group_size
        num = rows * columns
        if size is None:
            return rows, columns
        if num % size:
            raise ModelError(
                f"a weight of {rows} × {columns} cannot be divided into groups of {size} ({METHOD})"
            )
        return (num // size, size) if self.scheme.axis == 1 else (size, num // size)

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        module = module_of(part)
        (height, width) = self._shape(part.rows[1] - part.rows[0], columns)
        self.prefix = f"{module}.meta" if f"{module}.meta.scale" in available else module
        _, slices = SLICES[self.scheme.bits]
        shape: tuple[int, ...] = (-(-height // slices), width)
        stored = available.get(f"{module}.W_q")
        if stored is not None and stored.num_bytes == math.prod(shape) * (
            4 if self.scheme.bits == 3 else 1
        ):
            # also if it is stored as another type of the same bytes (view_as_float)
            shape = stored.shape
        scales = (height, 1) if self.scheme.axis == 1 else (1, width)
        names = [f"{self.prefix}.scale", f"{self.prefix}.zero"]
        packing = f"{self.prefix}.packing"
        wanted = [
            WantedWeight(f"{module}.W_q", shape),
            *(stored_as(available, name, scales) for name in names),
        ]
        return (
            [*wanted, WantedWeight(packing, available[packing].shape)]
            if packing in available
            else wanted
        )

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        if self.scheme.axis == 0:
            return "float_weight"
        return block_form(columns, math.gcd(columns, self.scheme.group_size or columns))

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | Tensor:
        rows = part.rows[1] - part.rows[0]
        bits = self.scheme.bits
        height, width = self._shape(rows, columns)
        codes = self._codes(part, pieces, height, width)
        scale, zero = (
            floats(pieces, f"{self.prefix}.{name}").float() for name in ("scale", "zero")
        )
        if self.scheme.axis == 0:
            return ((codes.float() - zero) * scale).view(rows, columns)
        scale, size = scales_of_rows(scale.flatten(), rows, columns, width)
        zero, _ = scales_of_rows(zero.flatten(), rows, columns, width)
        codes = codes.view(rows, columns)
        if bool((zero == zero.round()).all()) and float(zero.abs().max()) <= 127:
            return grouped_rows(codes, bits, scale, zero.int(), size)
        return grouped_rows(codes, bits, scale, 0, size, minimum=-scale * zero)

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return group_grid(columns, math.gcd(columns, self.scheme.group_size or columns))

    def _codes(self, part: Part, pieces: Pieces, height: int, width: int) -> Tensor:
        """Return the codes of the reshaped matrix, uint8 [height, width]."""
        bits = self.scheme.bits
        packing, slices = SLICES[bits]
        name = f"{self.prefix}.packing"
        if name in pieces:
            data = pieces[name].data
            name_in_file = (
                bytes(data.flatten().tolist()).decode("ascii", "replace")
                if isinstance(data, Tensor)
                else ""
            )
            if name_in_file != packing:
                raise ModelError(
                    f"tensor {name} says {name_in_file!r}; {METHOD} with {bits} bits needs "
                    f"{packing!r}"
                )
        stored = pieces[f"{module_of(part)}.W_q"].data
        assert isinstance(stored, Tensor)
        words = (
            stored.contiguous()
            .flatten()
            .view(torch.int32 if bits == 3 else torch.uint8)
            .view(-1, width)
        )
        shifts = [bits * place for place in reversed(range(slices))]
        codes = torch.cat([(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts])
        return codes[:height]

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, *astuple(self.scheme)]
