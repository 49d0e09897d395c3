"""A matrix of small integers with scales, in the packed layout of csrc/linear_blocks.c."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import RepackEntry
from pegboard.ops.blocks import Blocks
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.packed_weight import GROUP, PackedWeight
from pegboard_kernel_cpu.structures import Format, LinearBlocks, LookupBlocks
from pegboard_kernel_cpu.values import Call, Value, new, quantize_call, refusal, rows_of, submit

NO_SHIFT, MINIMUMS, ZEROS = range(3)
"""What a record has in addition to scales and codes, as in csrc/linear_blocks.c."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive packed rows of the matrix, [start, stop), all in the same format. order: of their columns (see Blocks)."""

    start: int
    stop: int
    format: Format
    packed: Tensor
    order: Tensor | None


class Run(NamedTuple):
    """See `packed_weight.Run`. order: number of the order of columns, -1 = in order."""

    start: int
    stop: int
    bits: int
    block_size: int
    is_wide: bool
    shift: int
    zero: int
    order: int

    def is_computable(self, columns: int) -> bool:
        if not all(isinstance(value, int) for value in self) or self.order < -1:
            return False
        is_whole = self.block_size == 16 or (self.block_size > 0 and self.block_size % 32 == 0 and columns % self.block_size == 0)
        is_known = self.is_wide in (0, 1) and self.shift in (NO_SHIFT, MINIMUMS, ZEROS)
        return is_known and is_whole and 1 <= self.bits <= 8

    def format(self) -> Format:
        scale_bytes = 4 if self.is_wide else 2
        shift_bytes = (0, scale_bytes, 1)[self.shift]
        sets = 2 if self.block_size == 16 else 1
        record_bytes = GROUP * sets * (scale_bytes + shift_bytes + self.block_size * self.bits // 8)
        return Format(self.bits, self.block_size, self.is_wide, self.shift, self.zero, record_bytes)

    def num_bytes(self, columns: int) -> int:
        per_record = max(self.block_size, 32)
        return -(-(self.stop - self.start) // GROUP) * (columns // per_record) * self.format().record_bytes


class NativeBlockWeight(PackedWeight):
    """See `pegboard.ops.blocks.BlockWeight`. A weight whose columns are in another order is not kept in the cache."""

    LAYOUT = "cpu blocks 3"
    RUN = Run

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
        cache: RepackEntry | None = None,
    ) -> None:
        super().__init__(shape, dtype, device, is_table, cache)
        self._orders: list[Tensor] = []

    def write(self, start: int, rows: Blocks) -> None:
        if not self.run_of(start, rows).is_computable(self.shape[1]):
            raise ModelError(
                f"blocks of {rows.block_size} columns with {rows.bits} bits are not computed for {self.shape[1]} columns"
            )
        super().write(start, rows)

    def run_of(self, start: int, rows: Blocks) -> Run:
        """The order of columns is noted."""
        has_zeros = isinstance(rows.zero, Tensor)
        shift = ZEROS if has_zeros else NO_SHIFT if rows.minimum is None else MINIMUMS
        is_wide, zero = rows.scale.dtype == torch.float32, 0 if isinstance(rows.zero, Tensor) else rows.zero
        order = -1 if rows.order is None else self._number_of(rows.order)
        return Run(start, start + rows.codes.shape[0], rows.bits, rows.block_size, is_wide, shift, zero, order)

    def segment_of(self, run: Run, packed: Tensor) -> Segment:
        order = self._orders[run.order] if run.order >= 0 else None
        return Segment(run.start, run.stop, run.format(), packed, order)

    def pack(self, segment: Segment, start: int, rows: Blocks) -> None:
        codes, scale = rows.codes.contiguous(), rows.scale.contiguous()
        shift = rows.zero if isinstance(rows.zero, Tensor) else rows.minimum
        shift = None if shift is None else shift.contiguous()
        library().pack_blocks(
            codes.data_ptr(), scale.data_ptr(), None if shift is None else shift.data_ptr(),
            start - segment.start, codes.shape[0], self.shape[1], byref(segment.format), segment.packed.data_ptr(),
        )  # fmt: skip

    def can_keep(self) -> bool:
        return not self._orders

    def checked(self, found: object, num_bytes: int) -> list[Run] | None:
        runs = super().checked(found, num_bytes)
        return None if runs is None or any(run.order >= 0 for run in runs) else runs

    def _number_of(self, order: Tensor) -> int:
        """Return the number of this order of columns. Equal orders, for example of merged parts, have the same number."""
        found = next((number for number, known in enumerate(self._orders) if torch.equal(known, order)), None)
        if found is not None:
            return found
        if self.segments:
            raise ModelError("a reload must not change the order of columns: load the checkpoint in a new engine")
        self._orders.append(order.contiguous())
        return len(self._orders) - 1

    def bind(self) -> "NativeBlockLinear":
        return NativeBlockLinear(self.segments, self.shape)

    def bind_lookup(self) -> "NativeBlockLookup":
        if len(self.segments) != 1 or self._orders:
            raise ModelError("an embedding table must be stored in a single format, with its columns in order")
        return NativeBlockLookup(self.segments[0], self.shape)

    def dense(self) -> Tensor:
        dense = torch.zeros(self.shape)
        for segment in self.segments:
            ids = torch.arange(segment.stop - segment.start)
            rows = NativeBlockLookup(segment, self.shape)(ids)
            order = torch.arange(self.shape[1]) if segment.order is None else segment.order
            dense[segment.start : segment.stop].index_copy_(1, order, rows)
        return dense


class NativeBlockLinear:
    """[T, in] → [T, out]. Quantizes the activations once for each order of columns, and then multiplies them with every
    segment."""

    def __init__(self, segments: Sequence[Segment], shape: tuple[int, int]) -> None:
        self.segments, self.shape = list(segments), shape
        self.orders = list({id(segment.order): segment.order for segment in segments}.values())
        self.is_padded = sum(segment.stop - segment.start for segment in segments) != shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        x, calls = rows_of(x), []
        if type(x) is Value and self.is_padded:
            raise refusal("has rows without weights (a padded vocabulary)")
        reads: dict[int, dict[str, Tensor]] = {}
        for order in self.orders:
            if type(x) is Value:
                quantized = x.recorder.quantized(x, order)
            else:
                quantized = new(x, x.shape[1], torch.int8), new(x, x.shape[1] // 32), new(x, x.shape[1] // 16)
                to = dict(zip(("to.codes", "to.scales", "to.sums"), quantized, strict=True))
                calls.append(quantize_call(x, order, to))
            reads[id(order)] = dict(zip(("x", "x_scales", "x_sums"), quantized, strict=True))
        out = new(x, self.shape[0])
        if self.is_padded:
            out.zero_()
        for segment in self.segments:
            columns = out if len(self.segments) == 1 else out[:, segment.start : segment.stop]
            calls.append(
                Call("linear_blocks", self._arguments(segment), reads[id(segment.order)], {"out": columns}, segment.packed)
            )
        submit(x, *calls)
        return out

    def _arguments(self, segment: Segment) -> LinearBlocks:
        rows = segment.stop - segment.start
        return LinearBlocks(weight=segment.packed.data_ptr(), rows=rows, columns=self.shape[1], format=segment.format)


class NativeBlockLookup:
    """[T] row indices → [T, width], from a table with one segment. Indices beyond the table give zeros."""

    def __init__(self, segment: Segment, shape: tuple[int, int]) -> None:
        self.segment, self.columns = segment, shape[1]

    def __call__(self, ids: Tensor) -> Tensor:
        out, segment = new(ids, self.columns), self.segment
        rows = segment.stop - segment.start
        arguments = LookupBlocks(weight=segment.packed.data_ptr(), rows=rows, columns=self.columns, format=segment.format)
        submit(ids, Call("lookup_blocks", arguments, {"ids": ids}, {"out": out}, segment.packed))
        return out
