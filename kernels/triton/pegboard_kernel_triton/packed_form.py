"""Packed rows of a matrix in device memory: how `Blocks` and `FloatCodes` are laid out for the
kernels.

Codes of 4 and 8 bits, the most common ones, are put into 32-bit words. The columns of a word are
`Form.words` apart. So the codes at one place of consecutive words are consecutive columns, and a
kernel unpacks a tile without moving numbers between threads. The last words of a row are padded.

A code of b other bits is cut into planes of 4, 2 or 1 bits, the low bits first: 3 bits are a plane
of 2 and one of 1. A byte of a plane holds the bits of consecutive columns, the first one lowest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pegboard.ops.blocks import Blocks
from pegboard.ops.float_codes import E2M1, FloatCodes, ScaleCodes, float8_values

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Bits of a code → bits of its planes."""
WORDS = (32, 16)
"""How many words a kernel reads at a time, if they fill the rows; else the smallest number."""
FLOATS = {
    "e4m3": (float8_values(torch.float8_e4m3fn), 0x7F),
    "e5m2": (float8_values(torch.float8_e5m2), 0x7C),
    "e2m1": (E2M1, 8),
}
"""Floats whose codes a kernel shifts to where a float32 has them: all values, and the first code
that is infinite or NaN."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel is compiled for: W[r, c] = (decode(code) − zero) · scale + minimum. Rows of
    equal forms are held together.

    decoding: of codes. "integer" = the code itself; "e4m3", "e5m2", "e2m1" = a finite float;
    "table" = a position in `table`. words: how many words are read together; 0 = planes. block:
    columns that share a scale.
    scales: how they are stored: "number" (float32, float16, bfloat16, int8), "pair" (4 bits, and 4
    bits of the minimum), "e4m3", "e8m0", or "table" = a position in `scale_table`, to which
    `scale_offset` is added. shift: what else a block has: "zero" = an int8 zero point, "minimum",
    or "". outer: columns that share a factor of the scale; 0 = there are none. dtypes: torch names
    of the scales and the outer factors.
    """

    decoding: str
    bits: int
    words: int
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
    """Rows in one form. planes: int32 words [rows, ⌈columns · bits / 32⌉ and padding], or uint8
    [rows, ⌈columns · bits of the plane / 8⌉]. scale: [rows, blocks]. shift: [rows, blocks], zero
    points or minimums; None = there are none, or they are in the pairs. outer: [1 or 2, rows,
    columns / form.outer], of scales and of minimums. table: what the codes stand for, float32;
    None = integers. scale_table: that of the form."""

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
        codes = _codes(self.planes, form, self.columns)
        if self.table is not None:
            numbers = self.table[codes.int()]
        else:
            numbers = codes.float() - (form.zero + (128 if form.bits == 8 else 0))
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
        words_of(rows.bits, columns),
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
        _packed(rows.codes.to(device), form),
        rows.scale.to(device),
        None if shift is None else shift.to(device),
        None if outer is None else outer.to(device),
    )


def pack_codes(rows: FloatCodes, device: torch.device | str) -> Packed:
    """Return codes of floats in packed order on the device. The factor of the matrix is part of
    scales in float32, and of the outer factors of others."""
    bits = {16: 4, 64: 6}.get(len(rows.values), 8)
    decoding = _decoding(rows)
    (count, columns) = rows.codes.shape
    block = min(rows.block[1], columns)
    factor = rows.factor
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
        words_of(bits, columns),
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
        _packed(rows.codes.to(device), form),
        scale.to(device),
        None,
        None if outer is None else outer.to(device),
        rows.values.to(device),
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


def words_of(bits: int, columns: int) -> int:
    """Return `Form.words` for rows of this length."""
    if bits not in (4, 8):
        return 0
    each = 32 // bits
    return next((count for count in WORDS if columns % (each * count) == 0), WORDS[-1])


def _decoding(rows: FloatCodes) -> str:
    """Return how codes are decoded. A matrix with infinities or NaN has a table."""
    values = rows.values.view(torch.int32)
    for decoding, (known, end) in FLOATS.items():
        if torch.equal(values, known.view(torch.int32)):
            sign = len(known) // 2
            is_finite = bool((rows.codes & (sign - 1) < end).all())
            return decoding if is_finite else "table"
    return "table"


def _packed(codes: Tensor, form: Form) -> tuple[Tensor, ...]:
    """Return codes [rows, columns] in packed order."""
    if form.words:
        each = 32 // form.bits
        codes = codes.view(torch.uint8) ^ 128 if codes.dtype == torch.int8 else codes
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (each * form.words)))
        groups = codes.unflatten(1, (-1, each, form.words)).int()
        words = groups[:, :, 0].clone()
        for place in range(1, each):
            words |= groups[:, :, place] << (form.bits * place)
        return (words.flatten(1),)
    planes = []
    for width in PLANES[form.bits]:
        per_byte = 8 // width
        part = codes & ((1 << width) - 1)
        part = torch.nn.functional.pad(part, (0, -part.shape[1] % per_byte))
        plane = part[:, ::per_byte].contiguous()
        for place in range(1, per_byte):
            plane |= part[:, place::per_byte] << (place * width)
        planes.append(plane)
        codes = codes >> width
    return tuple(planes)


def _codes(planes: tuple[Tensor, ...], form: Form, columns: int) -> Tensor:
    """Return the codes [rows, columns], uint8 or int32. Those of 8-bit integers are larger by
    128."""
    if form.words:
        (words,) = planes
        shifts = torch.arange(0, 32, form.bits, dtype=torch.int32, device=words.device)
        groups = words.unflatten(1, (-1, 1, form.words)) >> shifts.view(-1, 1)
        return (groups & ((1 << form.bits) - 1)).flatten(1)[:, :columns]
    codes: Tensor | None = None
    low = 0
    for width, plane in zip(PLANES[form.bits], planes, strict=True):
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=plane.device)
        part = (plane.unsqueeze(-1) >> shifts & ((1 << width) - 1)).flatten(1)[:, :columns]
        codes = part if codes is None else codes | part << low
        low += width
    assert codes is not None
    return codes
