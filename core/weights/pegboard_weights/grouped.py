"""Rows of integers with a scale, and perhaps a zero point, for each group of columns: what most
integer formats store."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.ops.blocks import Blocks
from pegboard_weights.cuts import Grid
from pegboard_weights.stored_weight import Form, Pieces, scales_of, tensor_of


def check_whole_groups(module: str, columns: int, group_size: int, method: str) -> None:
    """Raise ModelError if the columns of a module are not whole groups."""
    if columns % group_size:
        raise ModelError(
            f"{module} has {columns} columns, which are not groups of {group_size} ({method})"
        )


def column_groups(pieces: Pieces, name: str, columns: int, group_size: int) -> Tensor | None:
    """Return the group of each column [columns] int64 from the tensor `name`, or None if the
    columns are in order: there is no such tensor, or it is filled with -1. Raises ModelError if a
    group does not exist."""
    if name not in pieces:
        return None
    groups = tensor_of(pieces, name, torch.int32, torch.int64).long()
    if bool((groups == -1).all()):
        return None
    last = -(-columns // group_size) - 1
    if int(groups.min()) < 0 or int(groups.max()) > last:
        raise ModelError(
            f"tensor {name} names groups from {int(groups.min())} to {int(groups.max())}; there "
            f"are 0 to {last}"
        )
    return groups


def block_form(columns: int, group_size: int, groups: Tensor | None = None) -> Form:
    """Return the form of what `grouped_rows` returns: Blocks if every group has the same number of
    columns, 16 or a multiple of 32."""
    is_whole = columns % max(group_size, 32) == 0 and (group_size == 16 or group_size % 32 == 0)
    if is_whole and groups is not None:
        is_whole = bool((groups.bincount(minlength=columns // group_size) == group_size).all())
    return "block_weight" if is_whole else "float_weight"


def group_grid(columns: int, group_size: int, groups: Tensor | None = None) -> Grid:
    """Return where the columns of what `grouped_rows` returns can be divided."""
    if block_form(columns, group_size, groups) == "float_weight":
        return Grid()
    is_ordered = groups is None or bool((groups == torch.arange(columns) // group_size).all())
    return Grid(
        columns=group_size,
        whole_columns="" if is_ordered else "has its columns in another order (act order)",
    )


def grouped_rows(
    codes: Tensor,
    bits: int,
    scale: Tensor,
    zero: int | Tensor,
    group_size: int,
    groups: Tensor | None = None,
    minimum: Tensor | None = None,
) -> Blocks | Tensor:
    """Return W[r, c] = scale[r, g] · (codes[r, c] − zero[r, g]) + minimum[r, g] as Blocks, or as
    float32 [rows, columns] if no Blocks can hold it. g = groups[c], or c // group_size if groups is
    None.

    codes: uint8 [rows, columns] from 0 to 2^bits − 1, bits from 1 to 8. scale: [rows, groups],
    float16 or float32. zero: one number, or any integers [rows, groups]. minimum: [rows, groups],
    of the scale's type; the zero is then one number.
    """
    columns = codes.shape[1]
    if block_form(columns, group_size, groups) == "float_weight":
        group = torch.arange(columns) // group_size if groups is None else groups
        steps = codes.int() - (zero.int()[:, group] if isinstance(zero, Tensor) else zero)
        rows = scale.float()[:, group] * steps.float()
        return rows if minimum is None else rows + minimum.float()[:, group]
    order = None if groups is None else torch.argsort(groups, stable=True)
    if order is not None and bool((order == torch.arange(columns)).all()):
        order = None
    codes = (codes if order is None else codes[:, order]).contiguous()
    if bits == 8:
        codes = codes.view(torch.int8) + -128
        zero = (zero.int() if isinstance(zero, Tensor) else zero) - 128
    # one that int8 cannot hold: 256 in 8 bits
    if isinstance(zero, Tensor) and int(zero.max()) > 127:
        scale = scale.float()
        zero, minimum = 0, -scale * zero
    held = zero.to(torch.int8).contiguous() if isinstance(zero, Tensor) else zero
    return Blocks(bits, group_size, codes, scale.contiguous(), minimum, held, order)


def signed_rows(
    pieces: Pieces, name: str, scale: str, zero: str | None, bits: int, group_size: int
) -> Blocks | Tensor:
    """Return the rows of an int8 tensor, which holds signed integers of `bits` bits. scale, zero:
    names of the tensors with the scales and the signed int8 zero points, [rows, groups], [rows] or
    one value for all. zero None = 0. See `grouped_rows`."""
    codes = tensor_of(pieces, name, torch.int8)
    half = 1 << (bits - 1)
    if int(codes.min()) < -half or int(codes.max()) >= half:
        raise ModelError(f"tensor {name} has integers that do not fit into {bits} bits")
    rows = codes.shape[0]
    zeros = (
        half if zero is None else _per_row(tensor_of(pieces, zero, torch.int8), rows).int() + half
    )
    unsigned = (codes + -half).view(torch.uint8) if bits == 8 else (codes + half).to(torch.uint8)
    return grouped_rows(unsigned, bits, _per_row(scales_of(pieces, scale), rows), zeros, group_size)


def _per_row(values: Tensor, rows: int) -> Tensor:
    """Return scales or zero points as [rows, groups]."""
    return values.reshape(1, 1).expand(rows, 1) if values.numel() == 1 else values.reshape(rows, -1)


def scales_of_rows(values: Tensor, rows: int, columns: int, block: int) -> tuple[Tensor, int]:
    """Return one value for each `block` consecutive elements of a matrix, row after row, as values
    of groups of columns: [rows, groups], and the columns of a group. A block may reach into the
    next row, so a group is a part of a block that no row cuts."""
    size = math.gcd(columns, block)
    return values[torch.arange(0, rows * columns, size) // block].view(rows, -1), size
