"""A matrix that is written as rows in one or more formats, each of which is packed into groups of
16 rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.quantization import ExpertMemory, RepackEntry
from pegboard.ops.experts import one_by_one
from pegboard.ops.rounding import Rounding
from pegboard_kernel_cpu.repack import open_packed, store_packed

GROUP = 16
"""Number of rows that are packed together."""

CACHE_LINE = 64


class Run(Protocol):
    """Adjacent rows [start, stop) of the same format, before they are packed. It is a named tuple
    of JSON values."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    def is_computable(self, columns: int) -> bool:
        """True if the kernels compute with this format. The values may be of any type, because a
        file may have held them."""

    def num_bytes(self, columns: int) -> int:
        """Number of bytes of the packed rows."""


class PackedWeight:
    """The life of a weight (see `pegboard.ops.blocks.BlockWeight`). A subclass says how rows are
    packed.

    Neighboring rows of the same format are packed as one segment: an object with `start`, `stop`
    and `packed`, its bytes.
    """

    LAYOUT: ClassVar[str]
    """Name of the packed layout in the repack cache. Change it whenever the C code reads another
    layout."""
    RUN: ClassVar[Any]
    """The named tuple that describes a run."""
    IS_INVARIANT = False
    """Whether the sums of a token have one order, in a step of any size."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
        cache: RepackEntry | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        if dtype != torch.float32:
            raise ValueError(f"native packed weights compute in float32 only, not in {dtype}")
        if shape[1] % 32:
            raise ModelError(f"packed weights need a multiple of 32 columns, not {shape[1]}")
        self.shape = shape
        self.rounding = rounding
        self.is_table = is_table
        self.cache = cache
        self._written: list[tuple[int, Any]] = []
        self.segments: list[Any] = []

    @classmethod
    def takes(cls, rounding: Rounding, is_faster: bool) -> bool:
        """See `BlockWeight`."""
        return False

    def run_of(self, start: int, rows: Any) -> Any:
        """Return the run of these rows."""
        raise AssertionError("a subclass overrides run_of")

    def segment_of(self, run: Any, packed: Tensor) -> Any:
        """Return the segment of a run, whose bytes are `packed`."""
        raise AssertionError("a subclass overrides segment_of")

    def pack(self, segment: Any, start: int, rows: Any) -> None:
        """Pack rows into a segment. start: their first row in the matrix."""
        raise AssertionError("a subclass overrides pack")

    def can_keep(self) -> bool:
        """Return whether the bytes and the runs are all that the weight needs."""
        return True

    def restore(self) -> bool:
        """Map the weight from the file that an earlier start packed. Returns False if there is
        none."""
        kept = open_packed(self.cache, self.LAYOUT) if self.cache is not None else None
        runs = self.checked(kept.facts.get("runs"), len(kept.memory)) if kept is not None else None
        if kept is None or runs is None:
            return False
        self.segments = self._segments(runs, _tensor(kept.memory))
        return True

    def write(self, start: int, rows: Any) -> None:
        self._written.append((start, rows))

    def finish(self) -> None:
        """Pack all rows that were written. A second call packs into the same memory."""
        self._written.sort(key=lambda entry: entry[0])
        is_first = not self.segments
        runs = self._runs() if is_first else []
        memory = _zeros(self._offsets(runs)[-1])
        if is_first:
            self.segments = self._segments(runs, memory)
        for start, rows in self._written:
            segment = next(
                segment for segment in self.segments if segment.start <= start < segment.stop
            )
            self.pack(segment, start, rows)
        self._written = []
        if is_first and self.cache is not None and runs and self.can_keep():
            kept = store_packed(
                self.cache,
                self.LAYOUT,
                memoryview(memory.numpy()),
                {"runs": [list(run) for run in runs]},
            )
            self.segments = self._segments(runs, _tensor(kept.memory))

    def _runs(self) -> list[Any]:
        """Return the rows that were written in one format each."""
        runs: list[Any] = []
        for start, rows in self._written:
            run = self.run_of(start, rows)
            if runs and runs[-1].stop == start and runs[-1][2:] == run[2:]:
                runs[-1] = run._replace(start=runs[-1].start)
            else:
                runs.append(run)
        return runs

    def _segments(self, runs: Sequence[Any], memory: Tensor) -> list[Any]:
        offsets = self._offsets(runs)
        return [
            self.segment_of(run, memory[first:last])
            for run, first, last in zip(runs, offsets, offsets[1:], strict=False)
        ]

    def _offsets(self, runs: Sequence[Run]) -> list[int]:
        """Return the offset of each run's first byte, followed by the end of the last run. Each
        begins at a cache line."""
        offsets = [0]
        for run in runs:
            offsets.append(
                offsets[-1] + -(-run.num_bytes(self.shape[1]) // CACHE_LINE) * CACHE_LINE
            )
        return offsets

    def checked(self, content: object, num_bytes: int) -> list[Any] | None:
        """Return the runs that a file names, or None if they are not runs of a weight of this shape
        that fill `num_bytes` bytes. The kernels would read beyond such a weight."""
        runs = []
        end = 0
        for values in content if isinstance(content, list) else ():
            if not isinstance(values, list) or len(values) != len(self.RUN._fields):
                return None
            run = self.RUN(*values)
            if (
                type(run.start) is not int
                or type(run.stop) is not int
                or not run.is_computable(self.shape[1])
            ):
                return None
            if not end <= run.start < run.stop <= self.shape[0]:
                return None
            runs.append(run)
            end = run.stop
        return runs if runs and self._offsets(runs)[-1] == num_bytes else None

    def group_bytes(self, segment: Any) -> int:
        """Return the number of bytes of 16 packed rows of a segment."""
        raise AssertionError("a subclass overrides group_bytes")

    def linear(self, segments: Sequence[Any], shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        """Return the callable [T, in] → [T, out] of some segments."""
        raise AssertionError("a subclass overrides linear")

    def bind_experts(
        self, num_experts: int, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Experts whose matrices consist of different formats are computed one by one. Matrices
        whose rows are not whole groups are expanded to floats in every call, which is slow, but no
        real model has them."""
        rows = self.shape[0] // num_experts
        experts = [
            segments
            for expert in range(num_experts)
            if (segments := self._of_expert(expert * rows, (expert + 1) * rows))
        ]
        if len(experts) < num_experts:
            if self.IS_INVARIANT:
                raise ConfigError(
                    f"batch_invariant: experts of {rows} rows are computed only in whole groups of "
                    f"{GROUP} rows"
                )

            def expanded(x: Tensor, expert: int) -> Tensor:
                return torch.nn.functional.linear(
                    x, self.dense()[expert * rows : (expert + 1) * rows]
                )

            return one_by_one(
                [partial(expanded, expert=expert) for expert in range(num_experts)], rows, bias
            )
        if (together := self.together(experts, bias)) is not None:
            return together
        return one_by_one(
            [self.linear(segments, (rows, self.shape[1])) for segments in experts], rows, bias
        )

    def together(
        self, experts: list[list[Any]], bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return the product of all experts in one call for each segment, or None if their segments
        differ. experts: the segments of each expert."""
        raise AssertionError("a subclass overrides together")

    def expert_memory(self, num_experts: int) -> ExpertMemory | None:
        """See `MovableExpertsMethod`."""
        rows = self.shape[0] // num_experts
        of_experts = [self._of_expert(i * rows, (i + 1) * rows) for i in range(num_experts)]
        experts = [segments for segments in of_experts if segments is not None]
        if len(experts) < num_experts:
            return None
        is_shared = any(each.start // rows < (each.stop - 1) // rows for each in self.segments)
        forms = [[self.form_of(each, is_shared) for each in segments] for segments in experts]
        if None in forms[0] or any(form != forms[0] for form in forms):
            return None
        memory = [
            [tensor for each in segments for tensor in self.memory_of(each, is_shared)]
            for segments in experts
        ]
        return ExpertMemory([self.LAYOUT, self.shape[1], forms[0]], memory)

    def form_of(self, segment: Any, is_shared: bool) -> list[Any] | None:
        """Return, as JSON values, what must be equal for the memory of one segment to be that of
        another; None = it cannot. is_shared: segments reach over several experts, so what a segment
        has only once is not moved."""
        raise AssertionError("a subclass overrides form_of")

    def memory_of(self, segment: Any, is_shared: bool) -> list[Tensor]:
        """Return what is moved of the segment of an expert."""
        groups = -(-(segment.stop - segment.start) // GROUP)
        return [segment.packed[: groups * self.group_bytes(segment)]]

    def dense(self) -> Tensor:
        """Return the matrix as float32 [out, in]."""
        raise AssertionError("a subclass overrides dense")

    def _of_expert(self, start: int, stop: int) -> list[Any] | None:
        """Return the segments of the rows [start, stop), counted from `start`. None = a group of
        rows would have to be cut, or rows are missing."""
        segments = []
        at = start
        for segment in self.segments:
            first = max(start, segment.start)
            last = min(stop, segment.stop)
            if first >= last:
                continue
            if (
                first != at
                or (first - segment.start) % GROUP
                or (last - segment.start) % GROUP
                and last != segment.stop
            ):
                return None
            size = self.group_bytes(segment)
            at = last
            packed = segment.packed[(first - segment.start) // GROUP * size :]
            segments.append(replace(segment, start=first - start, stop=last - start, packed=packed))
        return segments if at == stop else None

    def tensors(self) -> list[Tensor]:
        """Return the packed rows. Orders of columns and tables stay as the first load made them."""
        return [segment.packed for segment in self.segments]


def _zeros(size: int) -> Tensor:
    """Return a zeroed buffer that is aligned to a cache line."""
    raw = torch.zeros(size + CACHE_LINE, dtype=torch.uint8)
    offset = -raw.data_ptr() % CACHE_LINE
    return raw[offset : offset + size]


def _tensor(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
