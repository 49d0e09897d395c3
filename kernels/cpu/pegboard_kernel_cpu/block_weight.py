"""A matrix of small integers with scales, in the packed layout of csrc/linear_blocks.c."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.ops.blocks import Blocks
from pegboard_kernel_cpu.elementwise import rows_of
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.recorder import NativeRecorder, Value
from pegboard_kernel_cpu.structures import Format, LinearBlocks, LookupBlocks, Quantize, Quantized

GROUP = 16
"""Rows that are packed together."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one format: rows [start, stop) of the matrix, packed."""

    start: int
    stop: int
    format: Format
    packed: Tensor


class NativeBlockWeight:
    """See `pegboard.ops.blocks.BlockWeight`. Neighbouring rows of one format are packed as one segment."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str, is_table: bool = False) -> None:
        if dtype != torch.float32:
            raise ValueError(f"native block weights compute in float32, not {dtype}")
        if shape[1] % 32:
            raise ModelError(f"block weights need a multiple of 32 columns, not {shape[1]}")
        self.shape, self.is_table = shape, is_table
        self._written: list[tuple[int, Blocks]] = []
        self.segments: list[Segment] = []

    def write(self, start: int, blocks: Blocks) -> None:
        self._written.append((start, blocks))

    def finish(self) -> None:
        """Pack what was written; a second time into the same memory."""
        self._written.sort(key=lambda entry: entry[0])
        if not self.segments:
            self.segments = _plan(self._written, self.shape)
        for start, blocks in self._written:
            segment = next(segment for segment in self.segments if segment.start <= start < segment.stop)
            _pack(segment, start, blocks, self.shape[1])
        self._written = []

    def bind(self) -> "NativeBlockLinear":
        return NativeBlockLinear(self.segments, self.shape)

    def bind_lookup(self) -> "NativeBlockLookup":
        if len(self.segments) != 1:
            raise ModelError("an embedding table is stored in one format")
        return NativeBlockLookup(self.segments[0], self.shape)

    def dense(self) -> Tensor:
        dense = torch.zeros(self.shape)
        for segment in self.segments:
            ids = torch.arange(segment.stop - segment.start)
            dense[segment.start : segment.stop] = NativeBlockLookup(segment, self.shape)(ids)
        return dense

    @property
    def nbytes(self) -> int:
        return sum(segment.packed.nbytes for segment in self.segments)


def _format(blocks: Blocks) -> Format:
    is_wide, has_minimum = blocks.scale.dtype == torch.float32, blocks.minimum is not None
    scale_bytes = GROUP * (4 if is_wide else 2) * (1 + has_minimum)
    code_bytes = GROUP * blocks.block_size * blocks.bits // 8
    return Format(blocks.bits, blocks.block_size, is_wide, has_minimum, blocks.zero, scale_bytes + code_bytes)


def _plan(written: Sequence[tuple[int, Blocks]], shape: tuple[int, int]) -> list[Segment]:
    """One segment per run of adjoining parts of the same format, with zeroed memory."""
    runs: list[tuple[int, int, Format]] = []
    for start, blocks in written:
        form, stop = _format(blocks), start + blocks.codes.shape[0]
        if runs and runs[-1][1] == start and bytes(runs[-1][2]) == bytes(form):
            runs[-1] = (runs[-1][0], stop, form)
        else:
            runs.append((start, stop, form))
    return [Segment(start, stop, form, _memory(stop - start, shape[1], form)) for start, stop, form in runs]


def _memory(rows: int, columns: int, form: Format) -> Tensor:
    """Zeros for that many packed rows, aligned to cache lines."""
    size = -(-rows // GROUP) * (columns // form.block_size) * form.record_bytes
    raw = torch.zeros(size + 64, dtype=torch.uint8)
    offset = -raw.data_ptr() % 64
    return raw[offset : offset + size]


def _pack(segment: Segment, start: int, blocks: Blocks, columns: int) -> None:
    codes, scale = blocks.codes.contiguous(), blocks.scale.contiguous()
    minimum = None if blocks.minimum is None else blocks.minimum.contiguous()
    library().pack_blocks(
        codes.data_ptr(), scale.data_ptr(), None if minimum is None else minimum.data_ptr(),
        start - segment.start, codes.shape[0], columns, byref(segment.format), segment.packed.data_ptr(),
    )  # fmt: skip


class NativeBlockLinear:
    """[T, in] → [T, out]: quantize the activations once, multiply with every segment."""

    def __init__(self, segments: Sequence[Segment], shape: tuple[int, int]) -> None:
        self.segments, self.shape = list(segments), shape

    def _arguments(self, segment: Segment, bias: Tensor | None = None) -> LinearBlocks:
        return LinearBlocks(
            weight=segment.packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr() + 4 * segment.start,
            rows=segment.stop - segment.start,
            columns=self.shape[1],
            format=segment.format,
        )

    def __call__(self, x: Tensor) -> Tensor:
        x = rows_of(x)
        count, columns = x.shape
        out = _result(self.segments, count, self.shape[0])
        codes, scales = torch.empty(count, columns, dtype=torch.int8), torch.empty(count, columns // 32)
        sums = torch.empty(count, columns // 16)
        to = Quantized(codes.data_ptr(), scales.data_ptr(), sums.data_ptr())
        calls: list = [("quantize", Quantize(x.data_ptr(), x.stride(0), to, columns))]
        for segment in self.segments:
            arguments = self._arguments(segment)
            arguments.x, arguments.x_scales, arguments.x_sums = codes.data_ptr(), scales.data_ptr(), sums.data_ptr()
            arguments.out, arguments.out_stride = out.data_ptr() + 4 * segment.start, out.stride(0)
            calls.append(("linear_blocks", arguments))
        library().team_run(calls, count)
        return out

    def record(self, recorder: NativeRecorder, x: Value, bias: Tensor | None = None) -> Value:
        out, quantized = recorder.value(self.shape[0]), recorder.quantized(x)
        reads = {"x": quantized.codes, "x_scales": quantized.scales, "x_sums": quantized.sums}
        for segment in self.segments:
            recorder.keep += [segment.packed, bias]
            columns = out.columns(segment.start, segment.stop)
            recorder.emit("linear_blocks", self._arguments(segment, bias), reads, {"out": columns})
        return out


def _result(segments: Sequence[Segment], count: int, rows: int) -> Tensor:
    """Memory for the result; zeros where rows belong to no segment (a padded vocabulary)."""
    covered = sum(segment.stop - segment.start for segment in segments)
    return torch.empty(count, rows) if covered == rows else torch.zeros(count, rows)


class NativeBlockLookup:
    """[T] row indices → [T, width] of a table in one segment; indices beyond it give zeros."""

    def __init__(self, segment: Segment, shape: tuple[int, int]) -> None:
        self.segment, self.columns = segment, shape[1]

    def __call__(self, ids: Tensor) -> Tensor:
        out = torch.empty(ids.shape[0], self.columns)
        arguments = LookupBlocks(
            ids=ids.data_ptr(), out=out.data_ptr(), out_stride=self.columns, weight=self.segment.packed.data_ptr(),
            rows=self.segment.stop - self.segment.start, columns=self.columns, format=self.segment.format,
        )  # fmt: skip
        library().team_run([("lookup_blocks", arguments)], ids.shape[0])
        return out
