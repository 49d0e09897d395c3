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
from pegboard_kernel_cpu.repack import open_packed, store_packed
from pegboard_kernel_cpu.structures import Format, LinearBlocks, LookupBlocks
from pegboard_kernel_cpu.values import Call, Value, new, quantize_call, refusal, rows_of, submit

GROUP = 16
"""Number of rows that are packed together."""

CACHE_LINE = 64

NO_SHIFT, MINIMUMS, ZEROS = range(3)
"""What a record has in addition to scales and codes, as in csrc/linear_blocks.c."""

LAYOUT = "cpu blocks 2"
"""Name of the packed layout in the repack cache. Change it whenever csrc/linear_blocks.c changes the layout it reads."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive packed rows of the matrix, [start, stop), all in the same format. order: of their columns (see Blocks)."""

    start: int
    stop: int
    format: Format
    packed: Tensor
    order: Tensor | None


class NativeBlockWeight:
    """See `pegboard.ops.blocks.BlockWeight`. Neighboring rows of the same format are packed as one segment."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
        cache: RepackEntry | None = None,
    ) -> None:
        if dtype != torch.float32:
            raise ValueError(f"native block weights compute in float32 only, not in {dtype}")
        if shape[1] % 32:
            raise ModelError(f"block weights need a multiple of 32 columns, not {shape[1]}")
        self.shape, self.is_table, self.cache = shape, is_table, cache
        self._written: list[tuple[int, Blocks]] = []
        self._orders: list[Tensor] = []
        self.segments: list[Segment] = []

    def restore(self) -> bool:
        """Map the weight from the file that an earlier start packed. Returns False if there is none."""
        kept = open_packed(self.cache, LAYOUT) if self.cache is not None else None
        runs = _checked(kept.facts.get("runs"), self.shape, len(kept.memory)) if kept is not None else None
        if kept is None or runs is None:
            return False
        self.segments = self._segments(runs, _tensor(kept.memory))
        return True

    def write(self, start: int, blocks: Blocks) -> None:
        if not self._runs([(start, blocks)])[0].is_computable(self.shape[1]):
            raise ModelError(
                f"blocks of {blocks.block_size} columns with {blocks.bits} bits are not computed for {self.shape[1]} columns"
            )
        self._written.append((start, blocks))

    def finish(self) -> None:
        """Pack all blocks that were written. A second call packs into the same memory. A weight whose columns are in another
        order is not kept in the cache."""
        self._written.sort(key=lambda entry: entry[0])
        is_first = not self.segments
        runs = self._runs(self._written) if is_first else []
        memory = _zeros(_offsets(runs, self.shape[1])[-1])
        if is_first:
            self.segments = self._segments(runs, memory)
        for start, blocks in self._written:
            segment = next(segment for segment in self.segments if segment.start <= start < segment.stop)
            _pack(segment, start, blocks, self.shape[1])
        self._written = []
        if is_first and self.cache is not None and runs and not self._orders:
            kept = store_packed(self.cache, LAYOUT, memoryview(memory.numpy()), {"runs": [list(run) for run in runs]})
            self.segments = self._segments(runs, _tensor(kept.memory))

    def _runs(self, written: Sequence[tuple[int, Blocks]]) -> list[_Run]:
        """Return the rows in one format each. The orders of columns are noted."""
        runs: list[_Run] = []
        for start, blocks in written:
            has_zeros = isinstance(blocks.zero, Tensor)
            shift = ZEROS if has_zeros else NO_SHIFT if blocks.minimum is None else MINIMUMS
            is_wide, zero = blocks.scale.dtype == torch.float32, 0 if has_zeros else blocks.zero
            order = -1 if blocks.order is None else self._number_of(blocks.order)
            run = _Run(start, start + blocks.codes.shape[0], blocks.bits, blocks.block_size, is_wide, shift, zero, order)
            if runs and runs[-1].stop == start and runs[-1][2:] == run[2:]:
                runs[-1] = run._replace(start=runs[-1].start)
            else:
                runs.append(run)
        return runs

    def _number_of(self, order: Tensor) -> int:
        """Return the number of this order of columns. Equal orders, for example of merged parts, have the same number."""
        found = next((number for number, known in enumerate(self._orders) if torch.equal(known, order)), None)
        if found is not None:
            return found
        if self.segments:
            raise ModelError("a reload must not change the order of columns: load the checkpoint in a new engine")
        self._orders.append(order.contiguous())
        return len(self._orders) - 1

    def _segments(self, runs: Sequence[_Run], memory: Tensor) -> list[Segment]:
        offsets = _offsets(runs, self.shape[1])
        return [
            Segment(run.start, run.stop, run.format(), memory[first:last], self._orders[run.order] if run.order >= 0 else None)
            for run, first, last in zip(runs, offsets, offsets[1:], strict=False)
        ]

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

    @property
    def nbytes(self) -> int:
        return sum(segment.packed.nbytes for segment in self.segments)


class _Run(NamedTuple):
    """Adjacent rows [start, stop) of the same format, before they are packed."""

    start: int
    stop: int
    bits: int
    block_size: int
    is_wide: bool
    shift: int
    zero: int
    order: int

    def is_computable(self, columns: int) -> bool:
        """True if csrc/linear_blocks.c computes with this format."""
        is_half = self.block_size == 16 and self.bits == 8 and self.is_wide and self.shift == NO_SHIFT
        is_whole = self.block_size > 0 and self.block_size % 32 == 0 and columns % self.block_size == 0
        is_known = self.bits in (4, 8) and self.is_wide in (0, 1) and self.shift in (NO_SHIFT, MINIMUMS, ZEROS)
        return is_known and (is_half or is_whole)

    def format(self) -> Format:
        scale_bytes = 4 if self.is_wide else 2
        shift_bytes = (0, scale_bytes, 1)[self.shift]
        record_bytes = GROUP * (scale_bytes + shift_bytes + self.block_size * self.bits // 8)
        return Format(self.bits, self.block_size, self.is_wide, self.shift, self.zero, record_bytes)

    def num_bytes(self, columns: int) -> int:
        """Number of bytes of the packed rows, rounded up to a multiple of the cache line."""
        size = -(-(self.stop - self.start) // GROUP) * (columns // self.block_size) * self.format().record_bytes
        return -(-size // CACHE_LINE) * CACHE_LINE


def _checked(found: object, shape: tuple[int, int], num_bytes: int) -> list[_Run] | None:
    """Return the runs that a file names, or None if they are not runs of a weight of this shape that fill `num_bytes` bytes. The
    kernels would read beyond such a weight."""
    runs, end = [], 0
    for values in found if isinstance(found, list) else ():
        if not isinstance(values, list) or len(values) != 8 or not all(isinstance(value, int) for value in values):
            return None
        run = _Run(*values)
        if not end <= run.start < run.stop <= shape[0] or run.order >= 0 or not run.is_computable(shape[1]):
            return None
        runs.append(run)
        end = run.stop
    return runs if runs and _offsets(runs, shape[1])[-1] == num_bytes else None


def _offsets(runs: Sequence[_Run], columns: int) -> list[int]:
    """Return the offset of each run's first byte, followed by the end of the last run."""
    offsets = [0]
    for run in runs:
        offsets.append(offsets[-1] + run.num_bytes(columns))
    return offsets


def _zeros(size: int) -> Tensor:
    """Return a zeroed buffer that is aligned to a cache line."""
    raw = torch.zeros(size + CACHE_LINE, dtype=torch.uint8)
    offset = -raw.data_ptr() % CACHE_LINE
    return raw[offset : offset + size]


def _tensor(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pack(segment: Segment, start: int, blocks: Blocks, columns: int) -> None:
    codes, scale = blocks.codes.contiguous(), blocks.scale.contiguous()
    shift = blocks.zero if isinstance(blocks.zero, Tensor) else blocks.minimum
    shift = None if shift is None else shift.contiguous()
    library().pack_blocks(
        codes.data_ptr(), scale.data_ptr(), None if shift is None else shift.data_ptr(),
        start - segment.start, codes.shape[0], columns, byref(segment.format), segment.packed.data_ptr(),
    )  # fmt: skip


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
