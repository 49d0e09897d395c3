"""Matrices that stay packed in device memory: the weight formats `block_weight` and
`code_weight`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import ExpertMemory, RepackEntry
from pegboard.ops.blocks import Blocks
from pegboard.ops.experts import one_by_one
from pegboard.ops.float_codes import FloatCodes
from pegboard.ops.rounding import Rounding, after_rounding
from pegboard_kernel_triton.packed_form import Packed, joined, pack_blocks, pack_codes
from pegboard_kernel_triton.packed_product import Experts, multiply
from pegboard_kernel_triton.rounded_product import (
    STEP,
    has_codes,
    multiplies,
    multiply_codes,
    round_rows,
)

Parts = list[tuple[tuple[int, int], Tensor | None]]
"""The rows of each part of an expert, and the number of its order for each expert."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows from `start` on that have one form. order: int32 [P, columns], where each column of the
    codes belongs; None = in order. The rows from firsts[p] on, counted from `start`, have order
    p."""

    start: int
    packed: Packed
    order: Tensor | None = None
    firsts: tuple[int, ...] = (0,)

    @property
    def stop(self) -> int:
        return self.start + len(self.packed.scale)

    def parts(self) -> list[Segment]:
        """Return the rows of each order."""
        stops = (*self.firsts[1:], self.stop - self.start)
        return [self.rows(first, stop) for first, stop in zip(self.firsts, stops, strict=True)]

    def rows(self, first: int, stop: int) -> Segment:
        """Return some rows, counted from `start`, as views."""
        packed = self.packed.rows(slice(first, stop))
        if self.order is None:
            return Segment(self.start + first, packed)
        last = bisect_left(self.firsts, stop)
        here = bisect_right(self.firsts, first) - 1
        firsts = tuple(max(0, row - first) for row in self.firsts[here:last])
        return Segment(self.start + first, packed, self.order[here:last], firsts)

    def dense(self) -> Tensor:
        """Return the rows, float32 [rows, columns]."""
        if self.order is None:
            return self.packed.dense()
        parts = []
        for part, order in zip(self.parts(), self.order, strict=True):
            rows = part.packed.dense()
            parts.append(torch.empty_like(rows).index_copy_(1, order.long(), rows))
        return torch.cat(parts)


def _is_continued(last: Segment, segment: Segment) -> bool:
    """Return whether rows belong to the segment that ends before them."""
    return (
        last.stop == segment.start
        and last.packed.form == segment.packed.form
        and (last.order is None) == (segment.order is None)
    )


def _joined(segments: list[Segment]) -> Segment:
    """Return rows that follow each other as one segment. Neighbors with equal orders share it."""
    start = segments[0].start
    packed = joined([each.packed for each in segments])
    orders: list[Tensor] = []
    firsts: list[int] = []
    for segment in segments:
        if segment.order is None:
            return Segment(start, packed)
        if not orders or not torch.equal(orders[-1], segment.order):
            orders.append(segment.order)
            firsts.append(segment.start - start)
    return Segment(start, packed, torch.cat(orders), tuple(firsts))


class PackedWeight:
    """The life of a weight. See `pegboard.ops.blocks.BlockWeight`. dtype: of rows that are looked
    up; products have the type of what is multiplied. A subclass says how rows are packed. They are
    packed on the device, and not kept in the cache. IS_INVARIANT: a token has the same bits in
    every step."""

    IS_INVARIANT = False

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
        cache: RepackEntry | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        self.shape = shape
        self.rounding = rounding
        self.dtype = dtype
        self.device = device
        self.segments: list[Segment] = []
        self._written: list[Segment] = []

    @classmethod
    def takes(cls, rounding: Rounding, is_faster: bool) -> bool:
        """See `BlockWeight`. Where codes are not multiplied with codes (`has_codes`), activations
        are rounded to what their codes stand for."""
        is_multiplied = rounding.is_simple and rounding.group % STEP == 0
        return not is_faster or (is_multiplied and multiplies(rounding.type))

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
            if runs and _is_continued(runs[-1][-1], segment):
                runs[-1].append(segment)
            else:
                runs.append([segment])
        self._written = []
        segments = [_joined(run) for run in runs]
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
        return self._product(self.segments, self.shape[0])

    def _product(self, segments: list[Segment], num_rows: int) -> Callable[[Tensor], Tensor]:
        products = _products(segments)
        rounding = self.rounding
        if rounding is not None and all(
            each.order is None and has_codes(each.packed, rounding) for each in products
        ):
            return partial(_multiply_codes, products, num_rows, rounding, self.IS_INVARIANT)
        return after_rounding(rounding, partial(_multiply, products, num_rows, self.IS_INVARIANT))

    def bind_experts(
        self, num_experts: int, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """See `BlockWeight`. Experts whose matrices consist of different forms, or of parts of
        other sizes, are multiplied one by one."""
        rows = self.shape[0] // num_experts
        if (parts := self._equal_parts(num_experts)) is not None:
            (segment,) = self.segments
            call = partial(_multiply_experts, segment, rows, parts, bias, self.IS_INVARIANT)
            return after_rounding(self.rounding, call)
        calls = [
            self._product(self._between(first, first + rows), rows)
            for first in range(0, self.shape[0], rows)
        ]
        return one_by_one(calls, rows, bias)

    def _equal_parts(self, num_experts: int) -> Parts | None:
        """Return the parts of every expert, if they are the same and all in one segment. A part
        has one order of columns."""
        rows = self.shape[0] // num_experts
        segment = self.segments[0]
        if (segment.start, segment.stop) != (0, self.shape[0]):
            return None
        if segment.order is None:
            return [((0, rows), None)]
        experts = [segment.rows(i * rows, (i + 1) * rows) for i in range(num_experts)]
        if any(expert.firsts != experts[0].firsts for expert in experts):
            return None
        stops = (*experts[0].firsts[1:], rows)
        parts: Parts = []
        for first, stop in zip(experts[0].firsts, stops, strict=True):
            numbers = [
                bisect_right(segment.firsts, i * rows + first) - 1 for i in range(num_experts)
            ]
            parts.append(((first, stop), torch.tensor(numbers, dtype=torch.int32).to(self.device)))
        return parts

    def _between(self, first: int, last: int) -> list[Segment]:
        """Return the rows first … last, counted from first."""
        return [
            replace(
                segment.rows(
                    max(first - segment.start, 0),
                    min(last, segment.stop) - segment.start,
                ),
                start=max(segment.start - first, 0),
            )
            for segment in self.segments
            if segment.start < last and first < segment.stop
        ]

    def expert_memory(self, num_experts: int) -> ExpertMemory | None:
        """See `MovableExpertsMethod`."""
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
    return segment.start, segment.stop, segment.packed.form, segment.order is None, segment.firsts


def _products(segments: list[Segment]) -> list[Segment]:
    """Return what is multiplied in one launch each: rows of one form and one order."""
    return [part for segment in segments for part in segment.parts()]


def _multiply(products: list[Segment], num_rows: int, is_invariant: bool, x: Tensor) -> Tensor:
    """Return x [T, in] times the transpose of the products' rows, [T, num_rows]. Other rows give
    zeros."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    is_padded = sum(product.stop - product.start for product in products) != num_rows
    new = x.new_zeros if is_padded else x.new_empty
    out = new(len(x), num_rows)
    for product in products:
        place = out[:, product.start : product.stop]
        multiply(x, product.packed, product.order, place, is_invariant=is_invariant)
    return out


def _multiply_codes(
    products: list[Segment], num_rows: int, rounding: Rounding, is_invariant: bool, x: Tensor
) -> Tensor:
    """Return what `_multiply` does, of activations that are rounded. See `has_codes`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    is_padded = sum(product.stop - product.start for product in products) != num_rows
    new = x.new_zeros if is_padded else x.new_empty
    out = new(len(x), num_rows)
    codes, scales = round_rows(x, rounding)
    for product in products:
        place = out[:, product.start : product.stop]
        multiply_codes(codes, scales, product.packed, rounding, place, is_invariant)
    return out


def _multiply_experts(
    segment: Segment,
    rows: int,
    parts: Parts,
    bias: Tensor | None,
    is_invariant: bool,
    x: Tensor,
    starts: Tensor,
) -> Tensor:
    """Return the products of sorted tokens x [N, in] with the `rows` rows of their experts."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(len(x), rows)
    for span, numbers in parts:
        experts = Experts(starts, rows, span, numbers, bias)
        multiply(x, segment.packed, segment.order, out, experts, is_invariant)
    return out


class TritonBlockWeight(PackedWeight):
    """See `pegboard.ops.blocks.BlockWeight`."""

    def pack(self, rows: Blocks) -> tuple[Packed, Tensor | None]:
        order = None if rows.order is None else rows.order.int().unsqueeze(0).to(self.device)
        return pack_blocks(rows, self.device), order


class TritonCodeWeight(PackedWeight):
    """See `pegboard.ops.float_codes.CodeWeight`."""

    def pack(self, rows: FloatCodes) -> tuple[Packed, Tensor | None]:
        return pack_codes(rows, self.device), None


class InvariantBlockWeight(TritonBlockWeight):
    """It is batch invariant: all products have tiles of one size, which is slow for few tokens."""

    IS_INVARIANT = True


class InvariantCodeWeight(TritonCodeWeight):
    """See `InvariantBlockWeight`."""

    IS_INVARIANT = True
