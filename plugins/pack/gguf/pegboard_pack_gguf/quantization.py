"""Quantization method `gguf`: weights stay packed, as `Blocks` or `FloatCodes`.

Pieces are views of the mapped file. It is decided per weight, whatever mix of GGUF types its parts
are stored in. If an earlier start left the packed form in the repack cache, the file is not read at
all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Cut, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import Box, TensorEntry, WantedWeight
from pegboard.ops.blocks import Blocks
from pegboard.ops.float_codes import FloatCodes
from pegboard_pack_gguf.decode import blocks_width, decode, is_decodable
from pegboard_pack_gguf.dequantize import dequantize_into
from pegboard_pack_gguf.float_codes import codes_width, float_codes, is_codes
from pegboard_pack_gguf.ggml_types import BY_STORED, PLAIN
from pegboard_pack_gguf.options import GGUFOptions
from pegboard_weights.cuts import Grid
from pegboard_weights.stored_weight import (
    AnyLayer,
    Form,
    FormatMethod,
    Pieces,
    PlainReader,
    floats,
    module_of,
)

if TYPE_CHECKING:
    from torch import Tensor

DECODING = "gguf 3"
"""Part of the keys of the repack cache. Change it whenever the same file decodes to different
values."""


class GGUFQuantization(FormatMethod):
    def __init__(self, options: GGUFOptions, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        self.options = options
        self._reader = GGUFReader(options.compute == "native")

    def reader(self, module: str, layer: AnyLayer) -> GGUFReader:
        return self._reader

    def kv_cache(self, layer: object) -> str | None:
        """Half precision, which is usual in programs that compute with these blocks. Its rounding
        error is far smaller than theirs."""
        is_float32 = (self.setup.plain_dtype or self.setup.dtype) == "float32"
        return "float16" if self.options.compute == "native" and is_float32 else None


class GGUFReader(PlainReader):
    """is_native: weights stay packed.

    A tensor "….scale" next to a weight is a factor of the whole matrix (NVFP4).
    """

    def __init__(self, is_native: bool) -> None:
        self.is_native = is_native

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        scale = _scale_of(part)
        return [
            *super().tensors(part, columns, available),
            *([WantedWeight(scale, (1,))] if scale in available else []),
        ]

    def boxes(self, weight: WantedWeight, cut: Cut) -> tuple[Box, ...]:
        return (cut.box,) if weight.shape == cut.shape else ()

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        stored = pieces[part.name].stored
        if not self.is_native or stored in PLAIN.values():
            return "float_weight"
        if is_codes(stored):
            return "code_weight"
        return (
            "block_weight"
            if is_decodable(stored) and _scale_of(part) not in pieces
            else "float_weight"
        )

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | FloatCodes | Tensor:
        piece = pieces[part.name]
        factor = (
            floats(pieces, _scale_of(part)).float().item() if _scale_of(part) in pieces else 1.0
        )
        if isinstance(piece.data, torch.Tensor):
            return piece.data if factor == 1.0 else piece.data.float() * factor
        if piece.stored not in BY_STORED:
            raise ModelError(
                f"{piece.name!r} is stored as {piece.stored!r}, which is not a GGUF type"
            )
        form = self.form(part, columns, pieces)
        if form == "block_weight":
            return decode(piece.data, piece.stored, piece.shape)
        if form == "code_weight":
            return float_codes(piece.data, piece.stored, piece.shape, factor)
        rows = torch.empty(tuple(piece.shape), dtype=torch.float32)
        dequantize_into(piece.data, piece.stored, rows)
        return rows if factor == 1.0 else rows.mul_(factor)

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        stored = pieces[part.name].stored
        form = self.form(part, columns, pieces)
        if form == "float_weight":
            return Grid()
        return Grid(columns=codes_width(stored) if form == "code_weight" else blocks_width(stored))

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        factor = ["factor"] if _scale_of(part) in pieces else []
        return [DECODING, pieces[part.name].stored, *factor]


def _scale_of(part: Part) -> str:
    return f"{module_of(part)}.scale"
