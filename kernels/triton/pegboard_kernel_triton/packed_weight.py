"""Matrices that stay packed in device memory: the weight formats `block_weight` and
`code_weight`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.ops.blocks import Blocks
from pegboard.ops.experts import one_by_one
from pegboard.ops.float_codes import FloatCodes
from pegboard_kernel_triton.packed_form import Packed, joined, pack_blocks, pack_codes
from pegboard_kernel_triton.packed_product import multiply

if TYPE_CHECKING:
    from pegboard.interfaces.quantization import ExpertMemory, RepackEntry


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows from `start` on that have one form. order: int32 [columns], where each column of the
    codes belongs; None = in order."""

    start: int
    packed: Packed
    order: Tensor | None

    @property
    def stop(self) -> int:
        return self.start + len(self.packed.scale)

    def dense(self) -> Tensor:
        """Return the rows, float32 [rows, columns]."""
        rows = self.packed.dense()
        if self.order is None:
            return rows
        return torch.empty_like(rows).index_copy_(1, self.order.long(), rows)


def is_continued(last: Segment, segment: Segment) -> bool:
    """Return whether rows belong to the segment that ends before them."""
    if last.stop != segment.start or last.packed.form != segment.packed.form:
        return False
    if last.order is None or segment.order is None:
        return last.order is segment.order
    return torch.equal(last.order, segment.order)


class PackedWeight:
    """The life of a weight. See `pegboard.ops.blocks.BlockWeight`; `dtype` is not used, because
    products have the type of what is multiplied. A subclass says how rows are packed. Packed rows
    are not kept in the cache: packing on the device is quick."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
        cache: RepackEntry | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.is_table = is_table
        self.segments: list[Segment] = []
        self._written: list[Segment] = []

    def pack(self, rows: Any) -> tuple[Packed, Tensor | None]:
        """Return rows in packed order, and the order of their columns."""
        raise AssertionError("a subclass overrides pack")

    def restore(self) -> bool:
        """See `BlockWeight`."""
        return False

    def write(self, start: int, rows: Any) -> None:
        """See `BlockWeight`."""
        packed, order = self.pack(rows)
        self._written.append(Segment(start, packed, order))

    def finish(self) -> None:
        """See `BlockWeight`. A second call writes to the same memory."""
        runs: list[list[Segment]] = []
        for segment in sorted(self._written, key=lambda segment: segment.start):
            if runs and is_continued(runs[-1][-1], segment):
                runs[-1].append(segment)
            else:
                runs.append([segment])
        self._written = []
        segments = [
            Segment(run[0].start, joined([each.packed for each in run]), run[0].order)
            for run in runs
        ]
        if not self.segments:
            self.segments = segments
            return
        if [_kind(segment) for segment in segments] != [_kind(each) for each in self.segments]:
            raise ModelError(
                "a reload must not change the format of a weight: load the checkpoint in a new "
                "engine"
            )
        for old, new in zip(self.segments, segments, strict=True):
            for target, source in zip(_memory(old), _memory(new), strict=True):
                target.copy_(source)

    def bind(self) -> Callable[[Tensor], Tensor]:
        """See `BlockWeight`."""
        return partial(_multiply, self.segments, self.shape[0])

    def bind_experts(
        self, num_experts: int, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """See `BlockWeight`."""
        rows = self.shape[0] // num_experts
        calls = [
            partial(_multiply, self._between(first, first + rows), rows)
            for first in range(0, self.shape[0], rows)
        ]
        return one_by_one(calls, rows, bias)

    def _between(self, first: int, last: int) -> list[Segment]:
        """Return the rows first … last, counted from first."""
        segments = []
        for segment in self.segments:
            start = max(first, segment.start)
            stop = min(last, segment.stop)
            if start < stop:
                rows = segment.packed.rows(slice(start - segment.start, stop - segment.start))
                segments.append(Segment(start - first, rows, segment.order))
        return segments

    def expert_memory(self, num_experts: int) -> ExpertMemory | None:
        """See `MovableExpertsMethod`."""
        from pegboard.interfaces.quantization import ExpertMemory

        rows = self.shape[0] // num_experts
        experts = [self._between(i * rows, (i + 1) * rows) for i in range(num_experts)]
        kinds = [[(s.start, s.packed.form) for s in segments] for segments in experts]
        has_order = any(segment.order is not None for segment in self.segments)
        if has_order or any(kind != kinds[0] for kind in kinds):
            return None
        return ExpertMemory(
            [self.shape[1], rows, repr(kinds[0])],
            [[t for s in segments for t in s.packed.tensors()] for segments in experts],
        )

    def bind_lookup(self) -> Callable[[Tensor], Tensor]:
        """See `BlockWeight`."""
        if len(self.segments) != 1 or self.segments[0].order is not None:
            raise ModelError(
                "an embedding table must be stored in a single format, with its columns in order"
            )
        (segment,) = self.segments
        if segment.stop == self.shape[0]:
            return lambda ids: segment.packed.rows(ids).dense().to(self.dtype)
        last = segment.stop - 1

        def padded(ids: Tensor) -> Tensor:
            rows = segment.packed.rows(ids.clamp(max=last)).dense().to(self.dtype)
            return rows.masked_fill_((ids > last).unsqueeze(1), 0)

        return padded

    def dense(self) -> Tensor:
        """Return the matrix as float32 [out, in]."""
        values = torch.zeros(self.shape, device=self.device)
        for segment in self.segments:
            values[segment.start : segment.stop] = segment.dense()
        return values

    def tensors(self) -> list[Tensor]:
        """See `BlockWeight`."""
        return [tensor for segment in self.segments for tensor in _memory(segment)]


def _memory(segment: Segment) -> list[Tensor]:
    order = [] if segment.order is None else [segment.order]
    return segment.packed.tensors() + order


def _kind(segment: Segment) -> tuple[object, ...]:
    return segment.start, segment.stop, segment.packed.form, segment.order is None


def _multiply(segments: list[Segment], num_rows: int, x: Tensor) -> Tensor:
    """Return x [T, in] times the transpose of the segments, [T, num_rows]. Rows without a segment
    give zeros."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    is_padded = sum(segment.stop - segment.start for segment in segments) != num_rows
    new = x.new_zeros if is_padded else x.new_empty
    out = new(len(x), num_rows)
    for segment in segments:
        multiply(x, segment.packed, segment.order, out[:, segment.start : segment.stop])
    return out


class TritonBlockWeight(PackedWeight):
    """See `pegboard.ops.blocks.BlockWeight`."""

    def pack(self, rows: Blocks) -> tuple[Packed, Tensor | None]:
        order = None if rows.order is None else rows.order.int().to(self.device)
        return pack_blocks(rows, self.device), order


class TritonCodeWeight(PackedWeight):
    """See `pegboard.ops.float_codes.CodeWeight`."""

    def pack(self, rows: FloatCodes) -> tuple[Packed, Tensor | None]:
        return pack_codes(rows, self.device), None
