"""The 2:4 sparse layout of the Marlin kernels (Castro and Frantar 2024), which GPTQ and
compressed-tensors checkpoints store.

Of four consecutive columns, two are kept. The kept codes are integers of 4 or 8 bits, with 2^(bits
− 1) added. All codes are read here, with zeros for the columns that were left out, because no
kernel skips them.

    weight int32 [in / 32, out · 16 · bits / 32]   meta int16 [in / 32, out · 2]   scales float16
    [groups, out]

The kept codes form a matrix [in / 2, out] of 16 × 16 tiles. Four tiles (1,024 codes) are in the
order in which the threads of a warp need them. A 16-bit number of `meta` has the places of 8 kept
codes of a row, 2 bits each. These numbers are in the order of CUTLASS: interleaved by two columns,
with rows of 64 in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard.ops.blocks import Blocks
from pegboard_weights.cuts import Grid
from pegboard_weights.grouped import block_form, check_whole_groups, group_grid, grouped_rows
from pegboard_weights.packed_integers import unpack
from pegboard_weights.stored_weight import Form, Pieces, module_of, scales_of, tensor_of

READING = "marlin 24 1"
"""Part of the keys of the repack cache. Change it whenever the same tensors are read as other
values."""

TILE = 16
ROWS = 64
"""Rows of a weight are stored 64 together."""


class Marlin24Reader:
    """group_size: −1 = a scale per row. names: of the tensors with the codes, their places and the
    scales."""

    def __init__(self, bits: int, group_size: int, names: tuple[str, str, str]) -> None:
        self.bits = bits
        self.group_size = group_size
        self.names = names

    def _group(self, columns: int) -> int:
        return columns if self.group_size == -1 else self.group_size

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        rows = part.rows[1] - part.rows[0]
        module = module_of(part)
        if rows % ROWS or columns % (2 * TILE):
            raise ModelError(
                f"{module} has {rows} rows and {columns} columns; marlin-24 needs multiples of "
                f"{ROWS} and {2 * TILE}"
            )
        group = self._group(columns)
        check_whole_groups(module, columns, group, "marlin-24")
        height = columns // (2 * TILE)
        shapes = (
            (height, rows * TILE * self.bits // 32),
            (height, 2 * rows),
            (columns // group, rows),
        )
        return [
            WantedWeight(f"{module}.{name}", shape)
            for name, shape in zip(self.names, shapes, strict=True)
        ]

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return block_form(columns, self._group(columns))

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | Tensor:
        codes, meta, scales = (f"{module_of(part)}.{name}" for name in self.names)
        kept = self._kept(tensor_of(pieces, codes, torch.int32), part.rows[1] - part.rows[0])
        places = _places(tensor_of(pieces, meta, torch.int16).flatten(), *kept.shape)
        half = 1 << (self.bits - 1)
        group = self._group(columns)
        every = torch.full((len(kept), columns), half, dtype=torch.uint8).scatter_(1, places, kept)
        scale = scales_of(pieces, scales)
        if group < columns // 2:
            scale = (
                torch.empty_like(scale)
                .view(-1, ROWS)
                .index_copy_(1, _order_of_scales(), scale.reshape(-1, ROWS))
            )
        return grouped_rows(every, self.bits, scale.view(-1, len(kept)).T, half, group)

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return group_grid(columns, self._group(columns))

    def _kept(self, words: Tensor, rows: int) -> Tensor:
        """Return the codes that are kept, uint8 [rows, columns / 2]."""
        order = _order_of_codes(self.bits)
        stored = unpack(words, self.bits, 1).reshape(-1, len(order))
        tiles = torch.empty_like(stored).index_copy_(1, order, stored)
        return (
            tiles.view(-1, rows // TILE, TILE, TILE)
            .permute(1, 3, 0, 2)
            .reshape(rows, -1)
            .contiguous()
        )

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, self.bits, self.group_size]


@cache
def _order_of_codes(bits: int) -> Tensor:
    """Return which of 1,024 codes in four tiles, row after row, each stored code is: int64 [1024].

    A thread of a warp has 8 codes of each of 4 rows in a tile: two neighboring rows (of the kept
    matrix) and those 8 below, for 2 groups of 4 columns. Within a word, the codes are ordered so
    that two 16-bit halves are decoded at once.
    """
    thread, column, half, low, pair = torch.meshgrid(
        *(torch.arange(n) for n in (32, 4, 2, 2, 2)), indexing="ij"
    )
    row = 2 * (thread % 4) + 8 * low + pair
    codes = 16 * row + 256 * (thread // 8) + 8 * (thread // 4 % 2) + 4 * half + column
    together = torch.tensor((0, 2, 4, 6, 1, 3, 5, 7) if bits == 4 else (0, 2, 1, 3))
    return codes.reshape(-1, len(together))[:, together].flatten()


@cache
def _order_of_scales() -> Tensor:
    """Return which of 64 rows each stored scale belongs to, if a row has several: int64 [64]."""
    return (8 * torch.arange(8)[:, None] + torch.tensor((0, 4, 1, 5, 2, 6, 3, 7))).flatten()


def _places(meta: Tensor, rows: int, num_kept: int) -> Tensor:
    """Return the column of each kept code, int64 [rows, num_kept]."""
    row = torch.arange(rows)[:, None]
    column = torch.arange(num_kept // 8)[None]
    within = row % 2 * 2 + row // 4 % 2 + row // 2 % 2 * 32 + row % 64 // 8 * 4
    to_row = row - row % 64 + within
    to_column = column
    # of 2 × 2 numbers, the two off the diagonal are exchanged
    turned = (to_column % 2) - (to_row % 2)
    to_row = to_row + turned
    to_column = to_column - turned
    numbers = meta[to_column // 2 * (2 * rows) + 2 * to_row + to_column % 2].int()
    place = torch.arange(8)
    place_in_four = numbers[..., None] >> 2 * place & 3
    return (16 * column[..., None] + 4 * (place // 2) + place_in_four).view(rows, -1)
