"""A matrix of small integers with scales, in the packed layout of csrc/linear_blocks.c."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import RepackEntry
from pegboard.ops.blocks import Blocks
from pegboard.ops.rounding import Rounding
from pegboard_kernel_cpu.experts import NativeExperts
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.packed_weight import GROUP, PackedWeight
from pegboard_kernel_cpu.structures import ExpertsBlocks, Format, LinearBlocks, LookupBlocks
from pegboard_kernel_cpu.values import (
    Call,
    Value,
    fields_of,
    new,
    new_quantized,
    quantize_call,
    refusal,
    rows_of,
    submit,
)

NO_SHIFT, MINIMUMS, ZEROS = range(3)
"""What a record has in addition to scales and codes, as in csrc/linear_blocks.c."""

HALVES, FLOATS, BYTES, PAIRS = range(4)
"""The types of scales, as in csrc/linear_blocks.c."""

SCALE_TYPES = {torch.float16: HALVES, torch.float32: FLOATS, torch.int8: BYTES, torch.uint8: PAIRS}


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive packed rows of the matrix, [start, stop), all in the same format. order: of their
    columns (see Blocks)."""

    start: int
    stop: int
    format: Format
    packed: Tensor
    order: Tensor | None


class Run(NamedTuple):
    """See `packed_weight.Run` and `Format` in csrc/linear_blocks.c. order: number of the order of
    columns, -1 = in order."""

    start: int
    stop: int
    bits: int
    block_size: int
    scale_type: int
    shift: int
    zero: int
    order: int
    outer: int

    def is_computable(self, columns: int) -> bool:
        if not all(isinstance(value, int) for value in self) or self.order < -1:
            return False
        is_whole = self.block_size == 16 or (
            self.block_size > 0 and self.block_size % 32 == 0 and columns % self.block_size == 0
        )
        is_known = (
            self.scale_type in range(4)
            and self.shift in (NO_SHIFT, MINIMUMS, ZEROS)
            and 1 <= self.bits <= 8
        )
        if self.scale_type in (HALVES, FLOATS) or not (is_whole and is_known):
            return is_whole and is_known and self.outer == 0
        is_outer = (
            self.outer > 0
            and self.outer % max(self.block_size, 32) == 0
            and columns % self.outer == 0
        )
        return is_outer and (self.scale_type == BYTES or self.shift == MINIMUMS)

    def format(self) -> Format:
        scale_bytes = (2, 4, 1, 1)[self.scale_type]
        shift_bytes = (0, 0 if self.scale_type == PAIRS else scale_bytes, 1)[self.shift]
        sets = 2 if self.block_size == 16 else 1
        record_bytes = GROUP * sets * (scale_bytes + shift_bytes + self.block_size * self.bits // 8)
        return Format(
            self.bits,
            self.block_size,
            self.scale_type,
            self.shift,
            self.zero,
            record_bytes,
            self.outer,
        )

    def num_bytes(self, columns: int) -> int:
        group_bytes = columns // max(self.block_size, 32) * self.format().record_bytes
        if self.outer:
            group_bytes += columns // self.outer * GROUP * (4 if self.shift == MINIMUMS else 2)
        return -(-(self.stop - self.start) // GROUP) * group_bytes


class NativeBlockWeight(PackedWeight):
    """See `pegboard.ops.blocks.BlockWeight`. A weight whose columns are in another order is not
    kept in the cache."""

    LAYOUT = "cpu blocks 4"
    RUN = Run

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
        cache: RepackEntry | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__(shape, dtype, device, is_table, cache, rounding)
        self._orders: list[Tensor] = []

    @classmethod
    def takes(cls, rounding: Rounding, is_faster: bool) -> bool:
        """See `BlockWeight`. Without a rounding, activations are int8 with finer scales. A scale
        per token lets the sums of a whole row be integers."""
        is_computed = rounding.type == "int8" and rounding.group % 32 == 0 and rounding.is_simple
        return is_computed and not is_faster

    def write(self, start: int, rows: Blocks) -> None:
        if self.rounding is not None and rows.order is not None:
            raise ModelError("columns in another order are not multiplied with rounded activations")
        if not self.run_of(start, rows).is_computable(self.shape[1]):
            raise ModelError(
                f"blocks of {rows.block_size} columns with {rows.bits} bits are not computed for "
                f"{self.shape[1]} columns"
            )
        super().write(start, rows)

    def run_of(self, start: int, rows: Blocks) -> Run:
        """The order of columns is noted."""
        has_zeros = isinstance(rows.zero, Tensor)
        scale_type = SCALE_TYPES[rows.scale.dtype]
        zero = 0 if isinstance(rows.zero, Tensor) else rows.zero
        shift = (
            ZEROS
            if has_zeros
            else NO_SHIFT
            if rows.minimum is None and scale_type != PAIRS
            else MINIMUMS
        )
        order = -1 if rows.order is None else self._number_of(rows.order)
        outer = 0 if rows.outer is None else rows.codes.shape[1] // rows.outer.shape[2]
        return Run(
            start,
            start + rows.codes.shape[0],
            rows.bits,
            rows.block_size,
            scale_type,
            shift,
            zero,
            order,
            outer,
        )

    def segment_of(self, run: Run, packed: Tensor) -> Segment:
        order = self._orders[run.order] if run.order >= 0 else None
        return Segment(run.start, run.stop, run.format(), packed, order)

    def pack(self, segment: Segment, start: int, rows: Blocks) -> None:
        if segment.format.scale_type == FLOATS and rows.scale.dtype == torch.float16:
            minimum = None if rows.minimum is None else rows.minimum.float()
            rows = replace(rows, scale=rows.scale.float(), minimum=minimum)
        if bytes(self.run_of(start, rows).format()) != bytes(segment.format):
            raise ModelError(
                "a reload must not change the format of integers or scales: load the checkpoint "
                "in a new engine"
            )
        shift = rows.zero if isinstance(rows.zero, Tensor) else rows.minimum
        stored = (rows.codes, rows.scale, shift, rows.outer)
        held = [None if part is None else part.contiguous() for part in stored]
        library().pack_blocks(
            *(None if part is None else part.data_ptr() for part in held),
            start - segment.start,
            rows.codes.shape[0],
            self.shape[1],
            byref(segment.format),
            segment.packed.data_ptr(),
        )

    def can_keep(self) -> bool:
        return not self._orders

    def checked(self, content: object, num_bytes: int) -> list[Run] | None:
        runs = super().checked(content, num_bytes)
        return None if runs is None or any(run.order >= 0 for run in runs) else runs

    def _number_of(self, order: Tensor) -> int:
        """Return the number of this order of columns. Equal orders, for example of merged parts,
        have the same number."""
        index = next(
            (number for number, known in enumerate(self._orders) if torch.equal(known, order)), None
        )
        if index is not None:
            return index
        if self.segments:
            raise ModelError(
                "a reload must not change the order of columns: load the checkpoint in a new engine"
            )
        self._orders.append(order.contiguous())
        return len(self._orders) - 1

    def bind(self) -> "NativeBlockLinear":
        return self.linear(self.segments, self.shape)

    def group_bytes(self, segment: Segment) -> int:
        form = segment.format
        columns = self.shape[1]
        size = columns // max(form.block_size, 32) * form.record_bytes
        return size + (
            columns // form.outer * GROUP * (4 if form.shift == MINIMUMS else 2)
            if form.outer
            else 0
        )

    def linear(self, segments: Sequence[Segment], shape: tuple[int, int]) -> "NativeBlockLinear":
        return NativeBlockLinear(segments, shape, self.rounding, has_tiles=not self.IS_INVARIANT)

    def together(self, experts: list[list[Segment]], bias: Tensor | None) -> NativeExperts | None:
        kinds = {
            tuple((s.start, s.stop, s.order is None, bytes(s.format)) for s in segments)
            for segments in experts
        }
        if len(kinds) > 1 or any(segment.order is not None for segment in experts[0]):
            return None
        slices = []
        for segments in zip(*experts, strict=True):
            products = [_arguments(each, self.shape[1], self.rounding) for each in segments]
            for expert, product in enumerate(products):
                product.bias = (
                    None if bias is None else bias[expert, segments[0].start :].data_ptr()
                )
            slices.append((segments[0].stop - segments[0].start, products))
        return NativeExperts("experts_blocks", ExpertsBlocks, slices, self._inputs, (experts, bias))

    def _inputs(self, x: Tensor) -> tuple[dict[str, Tensor], list[Call]]:
        return _quantized(x, None, self.rounding, has_tiles=not self.IS_INVARIANT)

    def form_of(self, segment: Segment, is_shared: bool) -> list[Any] | None:
        if segment.order is not None:
            return None
        return [segment.start, segment.stop, bytes(segment.format).hex()]

    def bind_lookup(self) -> "NativeBlockLookup":
        if len(self.segments) != 1 or self._orders:
            raise ModelError(
                "an embedding table must be stored in a single format, with its columns in order"
            )
        return NativeBlockLookup(self.segments[0], self.shape)

    def dense(self) -> Tensor:
        dense = torch.zeros(self.shape)
        for segment in self.segments:
            ids = torch.arange(segment.stop - segment.start)
            rows = NativeBlockLookup(segment, self.shape)(ids)
            order = torch.arange(self.shape[1]) if segment.order is None else segment.order
            dense[segment.start : segment.stop].index_copy_(1, order, rows)
        return dense


class InvariantBlockWeight(NativeBlockWeight):
    """Always multiplies integers, so that results do not depend on the batch."""

    IS_INVARIANT = True


class NativeBlockLinear:
    """[T, in] → [T, out]. Quantizes the activations once for each order of columns, and then
    multiplies them with every segment."""

    def __init__(
        self,
        segments: Sequence[Segment],
        shape: tuple[int, int],
        rounding: Rounding | None,
        *,
        has_tiles: bool,
    ) -> None:
        self.segments = list(segments)
        self.shape = shape
        self.rounding = rounding
        self.has_tiles = has_tiles
        self.orders = list({id(segment.order): segment.order for segment in segments}.values())
        self.is_padded = sum(segment.stop - segment.start for segment in segments) != shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        x = rows_of(x)
        calls = []
        if type(x) is Value and self.is_padded:
            raise refusal("has rows without weights (a padded vocabulary)")
        reads: dict[int, dict[str, Tensor]] = {}
        for order in self.orders:
            reads[id(order)], before = _quantized(x, order, self.rounding, has_tiles=self.has_tiles)
            calls += before
        out = new(x, self.shape[0])
        if self.is_padded:
            out.zero_()
        for segment in self.segments:
            columns = out if len(self.segments) == 1 else out[:, segment.start : segment.stop]
            arguments = _arguments(segment, self.shape[1], self.rounding)
            calls.append(
                Call(
                    "linear_blocks",
                    arguments,
                    reads[id(segment.order)],
                    {"out": columns},
                    segment.packed,
                )
            )
        submit(x, *calls)
        return out


def _arguments(segment: Segment, columns: int, rounding: Rounding | None) -> LinearBlocks:
    rows = segment.stop - segment.start
    return LinearBlocks(
        weight=segment.packed.data_ptr(),
        rows=rows,
        columns=columns,
        format=segment.format,
        is_whole=rounding is not None and rounding.group in (0, columns),
    )


def _quantized(
    x: Tensor, order: Tensor | None, rounding: Rounding | None, *, has_tiles: bool
) -> tuple[dict[str, Tensor], list[Call]]:
    """Return x as the products read it, and the calls that must run before."""
    calls: list[Call] = []
    if type(x) is Value:
        parts = x.recorder.quantized(x, order, rounding)
    else:
        parts = new_quantized(x, rounding)
        calls.append(quantize_call(x, order, fields_of(parts), rounding))
    names = ("x", "x_scales", "x_sums", "x_words")[: 4 if has_tiles else 3]
    return dict(zip(names, parts, strict=False)), calls


class NativeBlockLookup:
    """[T] row indices → [T, width], from a table with one segment. Indices beyond the table give
    zeros."""

    def __init__(self, segment: Segment, shape: tuple[int, int]) -> None:
        self.segment = segment
        self.columns = shape[1]

    def __call__(self, ids: Tensor) -> Tensor:
        out = new(ids, self.columns)
        segment = self.segment
        rows = segment.stop - segment.start
        arguments = LookupBlocks(
            weight=segment.packed.data_ptr(), rows=rows, columns=self.columns, format=segment.format
        )
        submit(ids, Call("lookup_blocks", arguments, {"ids": ids}, {"out": out}, segment.packed))
        return out
