"""Which modules are ternary, and how one is read from its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard.ops.blocks import Blocks
from pegboard_quantization_ternary.packing import BITS, PER_BYTE, ZERO, unpack
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.cuts import Grid
from pegboard_weights.grouped import block_form, group_grid, grouped_rows
from pegboard_weights.stored_weight import (
    AnyLayer,
    Form,
    FormatMethod,
    Pieces,
    module_of,
    scales_of,
    stored_as,
    tensor_of,
)

READING = "ternary 1"
"""A part of the keys of the repack cache. Change it whenever the same tensors are read as other
values."""


class TernaryMethod(FormatMethod):
    """Linear layers are ternary, except those in the config's `ignore`. Embeddings and output heads
    are plain."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        self._ignore = QuantConfig(setup.config, "ternary").names("ignore")

    def reader(self, module: str, layer: AnyLayer) -> TernaryReader | None:
        is_plain = (
            isinstance(layer, EmbeddingLayer) or layer.is_head or matches(module, self._ignore)
        )
        return None if is_plain else TernaryReader()


class TernaryReader:
    """Reads the tensors of one module. A group of weights with one scale is a whole row."""

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        rows = part.rows[1] - part.rows[0]
        if columns % PER_BYTE:
            raise ModelError(
                f"{module_of(part)} has {columns} columns; ternary weights need a multiple of "
                f"{PER_BYTE}"
            )
        return [
            WantedWeight(_packed(part), (rows, columns // PER_BYTE)),
            stored_as(available, _scale(part), (rows,), (rows, 1)),
        ]

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return block_form(columns, columns)

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | Tensor:
        codes = unpack(tensor_of(pieces, _packed(part), torch.uint8))
        if int(codes.max()) > 2:
            raise ModelError(f"tensor {_packed(part)} has a code of 3; ternary weights have 0 to 2")
        scale = scales_of(pieces, _scale(part)).reshape(-1, 1)
        return grouped_rows(codes, BITS, scale, ZERO, columns)

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return group_grid(columns, columns)

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING]


def _packed(part: Part) -> str:
    return f"{module_of(part)}.weight_packed"


def _scale(part: Part) -> str:
    return f"{module_of(part)}.weight_scale"
