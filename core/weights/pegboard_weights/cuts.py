"""What a rank holds of a matrix: a rectangle, cut out of any form. Blocks stay whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Cut
from pegboard.ops.blocks import Blocks
from pegboard.ops.float_codes import FloatCodes

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the matrices of a format can be divided: between blocks of this many rows and columns.
    whole_columns: why the columns cannot be divided at all; "" = they can."""

    rows: int = 1
    columns: int = 1
    whole_columns: str = ""

    def check(self, cut: Cut, name: str) -> None:
        """Raise ModelError if a part begins or ends within a block. name: of the tensor."""
        if self.whole_columns and cut.columns != (0, cut.shape[1]):
            raise ModelError(
                f"tensor {name} {self.whole_columns}, so ranks cannot divide its columns; use "
                "tensor_parallel_size=1, or a checkpoint in another format"
            )
        _units(cut.rows, cut.shape[0], self.rows, name)
        _units(cut.columns, cut.shape[1], self.columns, name)


def cut_out(
    rows: Blocks | FloatCodes | Tensor, cut: Cut, name: str
) -> Blocks | FloatCodes | Tensor:
    """Return the part of a matrix, which `Grid.check` has found possible. name: of the tensor."""
    if isinstance(rows, Blocks):
        return _blocks(rows, cut, name)
    return cut.of(rows) if isinstance(rows, Tensor) else _codes(rows, cut, name)


def _blocks(blocks: Blocks, cut: Cut, name: str) -> Blocks:
    rows = slice(*cut.rows)
    zero = blocks.zero
    if cut.columns == (0, cut.shape[1]):
        return replace(
            blocks,
            codes=blocks.codes[rows],
            scale=blocks.scale[rows],
            minimum=None if blocks.minimum is None else blocks.minimum[rows],
            zero=zero[rows] if isinstance(zero, Tensor) else zero,
            outer=None if blocks.outer is None else blocks.outer[:, rows],
        )
    assert blocks.order is None, f"{name}: the reader's grid does not say that columns stay whole"
    places = rows, slice(*_units(cut.columns, cut.shape[1], blocks.block_size, name))
    is_one = blocks.scale.shape[1] == 1
    outer = blocks.outer
    if outer is not None:
        each = cut.shape[1] // outer.shape[2]
        outer = outer[:, rows, slice(*_units(cut.columns, cut.shape[1], each, name))]
    return replace(
        blocks,
        block_size=cut.columns[1] - cut.columns[0] if is_one else blocks.block_size,
        codes=cut.of(blocks.codes).contiguous(),
        scale=blocks.scale[places],
        minimum=None if blocks.minimum is None else blocks.minimum[places],
        zero=zero[places] if isinstance(zero, Tensor) else zero,
        outer=outer,
    )


def _codes(codes: FloatCodes, cut: Cut, name: str) -> FloatCodes:
    height, width = codes.block
    places = (
        slice(*_units(cut.rows, cut.shape[0], height, name)),
        slice(*_units(cut.columns, cut.shape[1], width, name)),
    )
    scale = codes.scale
    if isinstance(scale, Tensor):
        scale = scale[places]
    else:
        each = scale.codes.shape[1] // scale.outer.shape[1] * width
        outer = places[0], slice(*_units(cut.columns, cut.shape[1], each, name))
        scale = replace(scale, codes=scale.codes[places], outer=scale.outer[outer])
    return replace(codes, codes=cut.of(codes.codes).contiguous(), scale=scale)


def _units(span: Span, count: int, unit: int, name: str) -> Span:
    """Return the blocks of `unit` rows or columns that the span has. A block may reach over the end
    of the matrix, and one that has all of it may be divided. Raises ModelError if the span begins
    or ends within another."""
    start, stop = span
    if unit >= count:
        return 0, 1
    if start % unit or (stop % unit and stop != count):
        raise ModelError(
            f"tensor {name} has blocks of {unit}, which the ranks cannot divide: this one would "
            f"hold {start} to {stop} of {count}; use another tensor_parallel_size, or a checkpoint "
            "with smaller blocks"
        )
    return start // unit, -(-stop // unit)
