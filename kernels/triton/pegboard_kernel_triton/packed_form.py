"""Packed rows of a matrix in device memory: how `Blocks` and `FloatCodes` are laid out for the
kernels.

A code of b bits is cut into planes of 8, 4, 2 or 1 bits, the low bits first: 3 bits are a plane of
2 and one of 1. A byte of a plane holds the bits of consecutive columns, the first one lowest. So a
matrix of b bits takes b bits per column, and a tile of any width is read with wide loads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pegboard.ops.blocks import Blocks
from pegboard.ops.float_codes import E2M1, FloatCodes, ScaleCodes, float8_values

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""Bits of a code → bits of its planes."""
SHIFTED_E4M3 = 2.0**8
"""What a float8_e4m3fn code is to be multiplied with after it was shifted into a float16."""
SHIFTED_E2M1 = 2.0**14
"""The same for FP4."""
NANS_OF_E4M3 = (0x7F, 0xFF)


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel is compiled for: W[r, c] = (decode(code) − zero) · scale + minimum. Rows of
    equal forms are held together.

    decoding: of codes. "integer" = the code itself; "e4m3", "e5m2", "e2m1" = a float that is
    shifted into a float16; "table" = a position in `table`. block: columns that share a scale.
    scales: how they are stored: "number" (float32, float16, bfloat16, int8), "pair" (4 bits, and 4
    bits of the minimum), "e4m3", "e8m0", or "table" = a position in `scale_table`, to which
    `scale_offset` is added. shift: what else a block has: "zero" = an int8 zero point, "minimum",
    or "". outer: columns that share a factor of the scale; 0 = there are none. dtypes: torch names
    of the scales and the outer factors.
    """

    decoding: str
    bits: int
    block: int
    scales: str
    dtypes: tuple[str, str]
    shift: str = ""
    zero: int = 0
    outer: int = 0
    table: tuple[float, ...] = ()
    scale_table: tuple[float, ...] = ()
    scale_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows in one form. planes: uint8 [rows, ⌈columns · bits of the plane / 8⌉]. scale: [rows,
    blocks]. shift: [rows, blocks], zero points or minimums; None = there are none, or they are in
    the pairs. outer: [1 or 2, rows, columns / form.outer], of scales and of minimums. table,
    scale_table: those of the form, float32."""

    form: Form
    columns: int
    planes: tuple[Tensor, ...]
    scale: Tensor
    shift: Tensor | None = None
    outer: Tensor | None = None
    table: Tensor | None = None
    scale_table: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Return all memory that differs from row to row."""
        more = [part for part in (self.shift, self.outer) if part is not None]
        return [*self.planes, self.scale, *more]

    def rows(self, rows: slice | Tensor) -> Packed:
        """Return some rows. A slice makes views."""
        return replace(
            self,
            planes=tuple(plane[rows] for plane in self.planes),
            scale=self.scale[rows],
            shift=None if self.shift is None else self.shift[rows],
            outer=None if self.outer is None else self.outer[:, rows],
        )

    def dense(self) -> Tensor:
        """Return the numbers as float32 [rows, columns], with their columns in packed order."""
        form = self.form
        codes = _codes(self.planes, form.bits, self.columns)
        numbers = _decoded(codes, form) if self.table is None else self.table[codes.int()]
        scale, minimum = self._scales()
        if form.shift == "zero":
            assert self.shift is not None
            numbers = numbers - _spread(self.shift.float(), form.block, self.columns)
        numbers = numbers * _spread(scale, form.block, self.columns)
        return numbers if minimum is None else numbers + _spread(minimum, form.block, self.columns)

    def _scales(self) -> tuple[Tensor, Tensor | None]:
        """Return scales and minimums, float32 [rows, blocks]."""
        form = self.form
        scale = self.scale
        minimum = self.shift if form.shift == "minimum" else None
        if form.scales == "pair":
            scale, minimum = scale & 15, scale >> 4
        if form.scales == "e4m3":
            scale = scale.view(torch.float8_e4m3fn)
        elif form.scales == "e8m0":
            scale = scale.view(torch.float8_e8m0fnu)
        elif self.scale_table is not None:
            scale = self.scale_table[scale.int()]
        scale = scale.float()
        minimum = None if minimum is None else minimum.float()
        if self.outer is not None:
            blocks = scale.shape[1]
            outer = _spread(self.outer.float(), -(-form.outer // form.block), blocks)
            scale = scale * outer[0]
            minimum = None if minimum is None else minimum * outer[1]
        return scale + form.scale_offset, minimum


def pack_blocks(rows: Blocks, device: torch.device | str) -> Packed:
    """Return integers in packed order on the device. `order` is left out."""
    columns = rows.codes.shape[1]
    is_pair = rows.scale.dtype == torch.uint8
    has_zeros = isinstance(rows.zero, Tensor)
    shift = rows.zero if isinstance(rows.zero, Tensor) else rows.minimum
    outer = rows.outer
    form = Form(
        "integer",
        rows.bits,
        rows.block_size,
        "pair" if is_pair else "number",
        (_name(rows.scale), "" if outer is None else _name(outer)),
        "zero" if has_zeros else "minimum" if is_pair or shift is not None else "",
        0 if isinstance(rows.zero, Tensor) else rows.zero,
        0 if outer is None else columns // outer.shape[2],
    )
    return Packed(
        form,
        columns,
        _planes(rows.codes.to(device), rows.bits),
        rows.scale.to(device),
        None if shift is None else shift.to(device),
        None if outer is None else outer.to(device),
    )


def pack_codes(rows: FloatCodes, device: torch.device | str) -> Packed:
    """Return codes of floats in packed order on the device. The factor of the matrix is part of
    scales in float32, and of the outer factors of others."""
    decoding, bits, unit = _decoding(rows)
    (count, columns) = rows.codes.shape
    block = min(rows.block[1], columns)
    factor = rows.factor * unit
    stored = rows.scale
    table: tuple[float, ...] = ()
    offset = 0.0
    outer: Tensor | None = None
    if isinstance(stored, ScaleCodes):
        kind = "table"
        scale = stored.codes
        table = tuple(stored.values.tolist())
        outer = (stored.outer.double() * factor).float()
        offset = stored.offset * factor
    elif stored.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        kind = "e4m3" if stored.dtype == torch.float8_e4m3fn else "e8m0"
        scale = stored.view(torch.uint8)
        outer = torch.full((len(stored), 1), factor)
    else:
        kind = "number"
        scale = stored if factor == 1 else (stored.double() * factor).float()
    scale = _repeated(scale, rows.block[0], count)
    outer = None if outer is None else _repeated(outer, rows.block[0], count).unsqueeze(0)
    form = Form(
        decoding,
        bits,
        block,
        kind,
        (_name(scale), "" if outer is None else _name(outer)),
        outer=0 if outer is None else -(-scale.shape[1] // outer.shape[2]) * block,
        table=tuple(rows.values.tolist()) if decoding == "table" else (),
        scale_table=table,
        scale_offset=offset,
    )
    return Packed(
        form,
        columns,
        _planes(rows.codes.to(device), bits),
        scale.to(device),
        None,
        None if outer is None else outer.to(device),
        torch.tensor(form.table).to(device) if form.table else None,
        torch.tensor(table).to(device) if table else None,
    )


def joined(parts: list[Packed]) -> Packed:
    """Return rows of the same form below each other."""
    first = parts[0]
    planes = zip(*(part.planes for part in parts), strict=True)
    return replace(
        first,
        planes=tuple(torch.cat(plane) for plane in planes),
        scale=torch.cat([part.scale for part in parts]),
        shift=None
        if first.shift is None
        else torch.cat([part.shift for part in parts if part.shift is not None]),
        outer=None
        if first.outer is None
        else torch.cat([part.outer for part in parts if part.outer is not None], dim=1),
    )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _repeated(values: Tensor, times: int, count: int) -> Tensor:
    """Return rows that `times` rows share for each of `count` rows."""
    if times == 1:
        return values.contiguous()
    if values.dtype.itemsize == 1:
        return values.view(torch.uint8).repeat_interleave(times, 0)[:count].contiguous()
    return values.repeat_interleave(times, 0)[:count].contiguous()


def _spread(values: Tensor, block: int, columns: int) -> Tensor:
    """Return the values [..., blocks] for every column."""
    return values.repeat_interleave(block, -1)[..., :columns]


def _decoding(rows: FloatCodes) -> tuple[str, int, float]:
    """Return how codes are decoded, their bits, and what the results are multiplied with. Shifting
    cannot give the NaN of e4m3, so a matrix that contains it has a table."""
    values = rows.values
    bits = {16: 4, 64: 6}.get(len(values), 8)
    if bits == 4 and torch.equal(values, E2M1):
        return "e2m1", bits, SHIFTED_E2M1
    for decoding, dtype, unit in (
        ("e4m3", torch.float8_e4m3fn, SHIFTED_E4M3),
        ("e5m2", torch.float8_e5m2, 1.0),
    ):
        is_same = bits == 8 and torch.equal(
            values.view(torch.int32), float8_values(dtype).view(torch.int32)
        )
        has_nan = decoding == "e4m3" and any(bool((rows.codes == n).any()) for n in NANS_OF_E4M3)
        if is_same and not has_nan:
            return decoding, bits, unit
    return "table", bits, 1.0


def _planes(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Return the planes of codes [rows, columns]."""
    codes = codes.view(torch.uint8) if codes.dtype == torch.int8 else codes
    planes = []
    for width in PLANES[bits]:
        per_byte = 8 // width
        part = codes & ((1 << width) - 1)
        part = torch.nn.functional.pad(part, (0, -part.shape[1] % per_byte))
        plane = part[:, ::per_byte].contiguous()
        for place in range(1, per_byte):
            plane |= part[:, place::per_byte] << (place * width)
        planes.append(plane)
        codes = codes >> width if width < 8 else codes
    return tuple(planes)


def _codes(planes: tuple[Tensor, ...], bits: int, columns: int) -> Tensor:
    """Return the codes [rows, columns] of planes, uint8."""
    codes: Tensor | None = None
    low = 0
    for width, plane in zip(PLANES[bits], planes, strict=True):
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=plane.device)
        part = (plane.unsqueeze(-1) >> shifts & ((1 << width) - 1)).flatten(1)[:, :columns]
        codes = part if codes is None else codes | part << low
        low += width
    assert codes is not None
    return codes


def _decoded(codes: Tensor, form: Form) -> Tensor:
    """Return the numbers of codes without a table, as the kernels decode them."""
    if form.decoding == "integer":
        return (codes.view(torch.int8) if form.bits == 8 else codes).float() - form.zero
    wide = codes.to(torch.int16)
    if form.decoding == "e4m3":
        halves = (wide & 0x80) << 8 | (wide & 0x7F) << 7
    elif form.decoding == "e2m1":
        halves = (wide & 8) << 12 | (wide & 7) << 9
    else:
        halves = wide << 8
    return halves.view(torch.float16).float()
