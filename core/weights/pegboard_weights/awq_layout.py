"""The layout of AWQ (Lin et al. 2023), as AutoAWQ stores it: 4-bit integers with a scale and a zero
point per group of columns.

W[r, c] = scale[r, g] · (code[r, c] − zero[r, g]). A linear layer has these tensors, with 8 codes in
each 32-bit word:

    version gemm    qweight [in, out / 8]   qzeros [in / group, out / 8]   scales [in / group, out]
    version gemv    qweight [out, in / 8]   qzeros [out, width / 8]        scales [out, width]

In gemm, the 4-bit parts of a word, lowest first, hold the rows 0, 2, 4, 6, 1, 3, 5, 7 of eight. In
gemv they are in order, and `width` is the number of groups, rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pegboard.interfaces.quantization import Cut, EmbeddingLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import Box, TensorEntry, WantedWeight
from pegboard.ops.blocks import Blocks
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.cuts import Grid
from pegboard_weights.grouped import block_form, check_whole_groups, group_grid
from pegboard_weights.packed_integers import unpack
from pegboard_weights.stored_weight import (
    AnyLayer,
    Form,
    FormatMethod,
    Pieces,
    module_of,
    scales_of,
    tensor_of,
    words_of,
)

READING = "awq 1"
"""Part of the keys of the repack cache. Change it whenever the same tensors are read as other
values."""

PER_WORD = 8
ROW_OF_PLACE = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight rows each 4-bit part of a word holds (gemm)."""


class AWQ(FormatMethod):
    """The method of checkpoints whose `quantization_config` is AutoAWQ's."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, "AWQ")
        config.one_of(("bits", "w_bit"), (4,), 4)
        self.group_size = config.size(("group_size", "q_group_size"), 128)
        self.has_zeros = config.flag("zero_point", True)
        self.version = str(
            config.one_of("version", ("gemm", "gemv", "GEMM", "GEMV"), "gemm")
        ).lower()
        self.excluded = config.names("modules_to_not_convert")

    def reader(self, module: str, layer: AnyLayer) -> AWQReader | None:
        if isinstance(layer, EmbeddingLayer) or layer.is_head or matches(module, self.excluded):
            return None
        group_size = layer.in_features if self.group_size == -1 else self.group_size
        check_whole_groups(module, layer.in_features, group_size, "AWQ")
        return AWQReader(group_size, self.has_zeros, is_gemv=self.version == "gemv")


class AWQReader:
    def __init__(self, group_size: int, has_zeros: bool, is_gemv: bool) -> None:
        self.group_size = group_size
        self.has_zeros = has_zeros
        self.is_gemv = is_gemv

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        rows = part.rows[1] - part.rows[0]
        groups = columns // self.group_size
        module = module_of(part)
        if self.is_gemv:
            width = _padded_groups(columns, self.group_size)
            codes = (rows, columns // PER_WORD)
            zeros = (rows, width // PER_WORD)
            scales = (rows, width)
        else:
            codes = (columns, rows // PER_WORD)
            zeros = (groups, rows // PER_WORD)
            scales = (groups, rows)
        wanted = [
            WantedWeight(f"{module}.qweight", codes),
            WantedWeight(f"{module}.scales", scales),
        ]
        return [*wanted, WantedWeight(f"{module}.qzeros", zeros)] if self.has_zeros else wanted

    def boxes(self, weight: WantedWeight, cut: Cut) -> tuple[Box, ...]:
        if not weight.name.endswith(".qweight"):
            return ()
        if self.is_gemv:
            return ((cut.rows, words_of(cut.columns, 4)),)
        return ((cut.columns, words_of(cut.rows, 4)),)

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return block_form(columns, self.group_size)

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | Tensor:
        module = module_of(part)
        groups = columns // self.group_size
        codes = tensor_of(pieces, f"{module}.qweight", torch.int32)
        scale = scales_of(pieces, f"{module}.scales")
        zeros = tensor_of(pieces, f"{module}.qzeros", torch.int32) if self.has_zeros else None
        if self.is_gemv:
            codes = unpack(codes, 4, 1)
            scale = scale[:, :groups]
            zero: int | Tensor = (
                8 if zeros is None else unpack(zeros, 4, 1)[:, :groups].to(torch.int8)
            )
        else:
            codes = _rows_of(codes)
            scale = scale.T
            zero = 8 if zeros is None else _rows_of(zeros).to(torch.int8)
        blocks = Blocks(4, self.group_size, codes.contiguous(), scale.contiguous(), zero=zero)
        return blocks if self.form(part, columns, pieces) == "block_weight" else blocks.dense()

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return group_grid(columns, self.group_size)

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, self.group_size, self.has_zeros, self.is_gemv]


def _rows_of(words: Tensor) -> Tensor:
    """Return the codes in the words of gemm: [n, rows / 8] → [rows, n]."""
    places = unpack(words, 4, 1).view(words.shape[0], -1, PER_WORD)
    rows = torch.empty_like(places)
    rows[:, :, list(ROW_OF_PLACE)] = places
    return rows.view(words.shape[0], -1).T.contiguous()


def _padded_groups(columns: int, group_size: int) -> int:
    """Return how many groups gemv stores for a row: enough to fill words, and more of them for
    small groups."""
    words = -(-(columns // group_size) // PER_WORD)
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    return -(-words // multiple) * multiple * PER_WORD
