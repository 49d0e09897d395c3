"""A matrix of codes that stand for floats, in the packed layout of csrc/linear_codes.c."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.ops.float_codes import FloatCodes, ScaleCodes, float8_values
from pegboard_kernel_cpu.experts import NativeExperts
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.packed_weight import GROUP, PackedWeight
from pegboard_kernel_cpu.structures import (
    E4M3_UNIT,
    CodeFormat,
    ExpertsCodes,
    LinearCodes,
    LookupCodes,
)
from pegboard_kernel_cpu.values import Call, Value, new, refusal, rows_of, submit, words_of

TABLE, E4M3, E5M2 = range(3)
"""How codes are decoded: by a lookup, or by shifting them into a half, as in
csrc/linear_codes.c."""
FLOAT_SCALES, HALF_SCALES, STEP_SCALES, TABLE_SCALES, E4M3_SCALES, E8M0_SCALES = range(6)
SCALE_KINDS = {
    torch.float16: HALF_SCALES,
    torch.float8_e4m3fn: E4M3_SCALES,
    torch.float8_e8m0fnu: E8M0_SCALES,
}
"""Scales that stay as they are stored. All others but codes become float32."""
SCALE_BYTES = {
    FLOAT_SCALES: 4,
    HALF_SCALES: 2,
    STEP_SCALES: 1,
    TABLE_SCALES: 1,
    E4M3_SCALES: 1,
    E8M0_SCALES: 1,
}
TABLE_SIZES = {STEP_SCALES: 2, TABLE_SCALES: 256}
"""How many numbers say what the codes of scales stand for: the first and the step, or all."""

_CODES = torch.arange(256, dtype=torch.int16)
SHIFTED = {
    E4M3: ((_CODES & 0x80) << 8 | (_CODES & 0x7F) << 7).view(torch.float16).float(),
    E5M2: float8_values(torch.float8_e5m2),
}
"""What the kernels decode the 256 codes to."""
ONE = {E4M3: 0x38, E5M2: 0x3C}
"""The code of 1.0."""
MOST_NAN = 6
"""The largest number of codes of a float8 type that mean NaN."""


class Run(NamedTuple):
    """See `packed_weight.Run`. outer: how many blocks share a scale of the second level; 0 = there
    is none. part: the first row if the rows have a factor and an offset of their own, which a
    reload may change, else -1. values, scales: the tables of codes and of scales that have one,
    else ()."""

    start: int
    stop: int
    bits: int
    kind: int
    scale_kind: int
    block_size: int
    outer: int
    part: int
    factor: float
    offset: float
    values: Sequence[float]
    scales: Sequence[float]

    def is_computable(self, columns: int) -> bool:
        if not all(isinstance(value, int) for value in self[:8]):
            return False
        if not all(isinstance(table, list | tuple) for table in self[10:]):
            return False
        if not all(
            isinstance(value, int | float)
            for value in (self.factor, self.offset, *self.values, *self.scales)
        ):
            return False
        size = {(4, TABLE): 16, (8, TABLE): 256, (8, E4M3): 0, (8, E5M2): 0}.get(
            (self.bits, self.kind)
        )
        is_whole = 0 < self.block_size <= columns and (
            self.block_size % 16 == 0 or self.block_size == columns
        )
        if len(self.values) != size or not is_whole or self.scale_kind not in SCALE_BYTES:
            return False
        if self.scale_kind not in TABLE_SIZES:
            return self.outer == 0 and not self.scales
        is_shared = self.outer > 0 and _num_blocks(columns, self.block_size) % self.outer == 0
        return is_shared and len(self.scales) == TABLE_SIZES[self.scale_kind]

    def num_bytes(self, columns: int) -> int:
        per_row = _bytes_of_row(columns, self.bits, self.scale_kind, self.block_size, self.outer)
        return -(-(self.stop - self.start) // GROUP) * GROUP * per_row


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive packed rows of the matrix, [start, stop), all in the same format. factor, values,
    scales: see csrc/linear_codes.c."""

    start: int
    stop: int
    format: CodeFormat
    packed: Tensor
    factor: Tensor
    values: Tensor
    scales: Tensor


class Prepared(NamedTuple):
    """Rows as csrc/linear_codes.c packs them. scales: [rows, blocks], float32, float16 or one byte
    each. outer: float32 [rows, blocks / run.outer], or empty."""

    run: Run
    codes: Tensor
    scales: Tensor
    outer: Tensor


class NativeCodeWeight(PackedWeight):
    """See `pegboard.ops.float_codes.CodeWeight`."""

    LAYOUT = "cpu codes 2"
    RUN = Run

    def write(self, start: int, rows: FloatCodes) -> None:
        prepared = _prepare(start, rows, self.shape[1])
        if not prepared.run.is_computable(self.shape[1]):
            raise ModelError(
                f"scales of {rows.block[1]} columns are not computed for {self.shape[1]} columns"
            )
        super().write(start, prepared)

    def run_of(self, start: int, rows: Prepared) -> Run:
        return rows.run

    def segment_of(self, run: Run, packed: Tensor) -> Segment:
        factor = torch.tensor([run.factor, run.offset], dtype=torch.float32)
        values = torch.tensor(run.values) if run.values else SHIFTED[run.kind]
        scales = torch.tensor(run.scales)
        form = CodeFormat(*run[2:7], factor.data_ptr(), values.data_ptr(), scales.data_ptr())
        return Segment(run.start, run.stop, form, packed, factor, values, scales)

    def pack(self, segment: Segment, start: int, rows: Prepared) -> None:
        run = rows.run
        form = segment.format
        is_same = run[2:7] == (form.bits, form.kind, form.scale_kind, form.block_size, form.outer)
        factor = torch.tensor([run.factor, run.offset], dtype=torch.float32)
        scales = torch.tensor(run.scales)
        values = torch.tensor(run.values) if run.values else segment.values
        same = [(values, segment.values), (scales, segment.scales)] + (
            [(factor, segment.factor)] if run.part < 0 else []
        )
        if not is_same or not all(
            torch.equal(new.view(torch.int32), old.view(torch.int32)) for new, old in same
        ):
            raise ModelError(
                "a reload must not change the format of codes and scales: load the checkpoint in "
                "a new engine"
            )
        segment.factor.copy_(factor)
        library().pack_codes(
            rows.codes.data_ptr(),
            rows.scales.data_ptr(),
            rows.outer.data_ptr(),
            start - segment.start,
            len(rows.codes),
            self.shape[1],
            byref(form),
            segment.packed.data_ptr(),
        )

    def bind(self) -> NativeCodeLinear:
        return self.linear(self.segments, self.shape)

    def group_bytes(self, segment: Segment) -> int:
        form = segment.format
        return GROUP * _bytes_of_row(
            self.shape[1], form.bits, form.scale_kind, form.block_size, form.outer
        )

    def linear(self, segments: Sequence[Segment], shape: tuple[int, int]) -> NativeCodeLinear:
        return NativeCodeLinear(segments, shape, self.IS_INVARIANT)

    def together(self, experts: list[list[Segment]], bias: Tensor | None) -> NativeExperts | None:
        if len({tuple((s.start, s.stop, *_kind(s)) for s in segments) for segments in experts}) > 1:
            return None
        slices = []
        for segments in zip(*experts, strict=True):
            products = [
                _arguments(segment, self.shape[1], self.IS_INVARIANT) for segment in segments
            ]
            for expert, product in enumerate(products):
                product.bias = (
                    None if bias is None else bias[expert, segments[0].start :].data_ptr()
                )
            slices.append((segments[0].stop - segments[0].start, products))
        return NativeExperts("experts_codes", ExpertsCodes, slices, _inputs, (experts, bias))

    def form_of(self, segment: Segment, is_shared: bool) -> list[Any] | None:
        form = segment.format
        shared = segment.factor.tolist() if is_shared else []
        tables = [segment.values.tolist(), segment.scales.tolist(), shared]
        return [segment.start, segment.stop, *_kind(segment), form.outer, *map(str, tables)]

    def memory_of(self, segment: Segment, is_shared: bool) -> list[Tensor]:
        factor = [] if is_shared else [segment.factor]
        return super().memory_of(segment, is_shared) + factor

    def bind_lookup(self) -> NativeCodeLookup:
        if len(self.segments) != 1:
            raise ModelError("an embedding table must be stored in a single format")
        return NativeCodeLookup(self.segments[0], self.shape)

    def dense(self) -> Tensor:
        dense = torch.zeros(self.shape)
        for segment in self.segments:
            rows = NativeCodeLookup(segment, self.shape)(torch.arange(segment.stop - segment.start))
            dense[segment.start : segment.stop] = rows
        return dense


class InvariantCodeWeight(NativeCodeWeight):
    """Always decodes to memory, so that results do not depend on the batch."""

    IS_INVARIANT = True


def _prepare(start: int, rows: FloatCodes, columns: int) -> Prepared:
    kind, unit, codes = _decoding(rows)
    scale_kind, scales, outer, table, offset = _scales(rows)
    factor = (
        unit
        * (1.0 if scale_kind == FLOAT_SCALES else rows.factor)
        * (E4M3_UNIT if scale_kind == E4M3_SCALES else 1.0)
    )
    is_shared = scale_kind == FLOAT_SCALES or (
        scale_kind < E4M3_SCALES and (rows.factor, offset) == (1.0, 0.0)
    )
    values = rows.values.tolist() if kind == TABLE else []
    bits = 4 if kind == TABLE and len(values) <= 16 else 8
    padded = _padded(values, 16 if bits == 4 else 256 if kind == TABLE else 0)
    block = min(rows.block[1], columns)
    level = scales.shape[1] // outer.shape[1] if outer.numel() else 0
    part = -1 if is_shared else start
    run = Run(
        start,
        start + len(codes),
        bits,
        kind,
        scale_kind,
        block,
        level,
        part,
        factor,
        offset,
        padded,
        table,
    )
    return Prepared(run, codes.contiguous(), scales.contiguous(), outer.contiguous())


def _scales(rows: FloatCodes) -> tuple[int, Tensor, Tensor, Sequence[float], float]:
    """Return the kind of scales, the scales of all rows, their second level, the table of scales,
    and what is added."""

    def repeated(scales: Tensor) -> Tensor:
        return scales.repeat_interleave(rows.block[0], 0)[: len(rows.codes)]

    stored = rows.scale
    nothing = torch.empty(0)
    if isinstance(stored, ScaleCodes):
        table: list[float] = stored.values.tolist()
        first = table[0]
        step = table[-1] - table[-2]
        has_steps = table == [first + step * place for place in range(len(table))]
        kind, numbers = (
            (STEP_SCALES, (first, step)) if has_steps else (TABLE_SCALES, _padded(table, 256))
        )
        return kind, repeated(stored.codes), repeated(stored.outer.float()), numbers, stored.offset
    kind = SCALE_KINDS.get(stored.dtype, FLOAT_SCALES)
    if kind == FLOAT_SCALES or bool(stored.float().isnan().any()):
        return FLOAT_SCALES, rows.scales(), nothing, (), 0.0
    return (
        kind,
        repeated(stored if kind == HALF_SCALES else stored.view(torch.uint8)),
        nothing,
        (),
        0.0,
    )


def _padded(table: list[float], size: int) -> tuple[float, ...]:
    return tuple(table + [0.0] * (size - len(table)))


def _bytes_of_row(columns: int, bits: int, scale_kind: int, block_size: int, outer: int) -> int:
    num_blocks = _num_blocks(columns, block_size)
    return (
        num_blocks * SCALE_BYTES[scale_kind]
        + columns * bits // 8
        + (num_blocks // outer * 4 if outer else 0)
    )


def _num_blocks(columns: int, block_size: int) -> int:
    return -(-columns // block_size)


def _decoding(rows: FloatCodes) -> tuple[int, float, Tensor]:
    """Return how the codes are decoded, what the results are to be multiplied with, and the codes,
    which may be other codes for the same values. Shifting cannot give e4m3's NaN, so a matrix that
    contains it has a table."""
    values = rows.values
    codes = rows.codes
    if len(values) <= 16:
        return TABLE, 1.0, codes
    if len(values) < 256:  # 6 bits, all of whose values e4m3 has
        same = values.unsqueeze(1) == SHIFTED[E4M3] * E4M3_UNIT
        return (
            (E4M3, E4M3_UNIT, same.int().argmax(1).byte()[codes.int()])
            if bool(same.any(1).all())
            else (TABLE, 1.0, codes)
        )
    for kind, shifted in SHIFTED.items():
        unit = (values[ONE[kind]] / shifted[ONE[kind]]).item()
        different = (shifted * unit != values).nonzero().flatten().tolist()
        if len(different) <= MOST_NAN and not any(
            bool((codes == code).any()) for code in different
        ):
            return kind, unit, codes
    return TABLE, 1.0, codes


def _kind(segment: Segment) -> tuple[int, ...]:
    """Return what the kernels decide once for all experts."""
    form = segment.format
    return form.bits, form.kind, form.scale_kind, form.block_size


def _arguments(segment: Segment, columns: int, is_invariant: bool) -> LinearCodes:
    return LinearCodes(
        weight=segment.packed.data_ptr(),
        rows=segment.stop - segment.start,
        columns=columns,
        is_invariant=is_invariant,
        format=segment.format,
    )


def _inputs(x: Tensor) -> tuple[dict[str, Tensor], list[Call]]:
    """Return what the products read of x, and the calls that must run before."""
    words, calls = words_of(x)
    return {"x": x, **words}, calls


class NativeCodeLinear:
    """[T, in] → [T, out]."""

    def __init__(
        self, segments: Sequence[Segment], shape: tuple[int, int], is_invariant: bool
    ) -> None:
        self.segments = list(segments)
        self.shape = shape
        self.is_invariant = is_invariant
        self.is_padded = sum(segment.stop - segment.start for segment in segments) != shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        x = rows_of(x)
        if type(x) is Value and self.is_padded:
            raise refusal("has rows without weights (a padded vocabulary)")
        out = new(x, self.shape[0])
        reads, calls = _inputs(x)
        if self.is_padded:
            out.zero_()
        for segment in self.segments:
            arguments = _arguments(segment, self.shape[1], self.is_invariant)
            columns = out if len(self.segments) == 1 else out[:, segment.start : segment.stop]
            calls.append(Call("linear_codes", arguments, reads, {"out": columns}, segment))
        submit(x, *calls)
        return out


class NativeCodeLookup:
    """[T] row indices → [T, width], from a table with one segment. Indices beyond the table give
    zeros."""

    def __init__(self, segment: Segment, shape: tuple[int, int]) -> None:
        self.segment = segment
        self.columns = shape[1]

    def __call__(self, ids: Tensor) -> Tensor:
        out = new(ids, self.columns)
        segment = self.segment
        rows = segment.stop - segment.start
        arguments = LookupCodes(
            weight=segment.packed.data_ptr(), rows=rows, columns=self.columns, format=segment.format
        )
        submit(ids, Call("lookup_codes", arguments, {"ids": ids}, {"out": out}, segment))
        return out
