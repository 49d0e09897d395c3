"""A float32 matrix in the packed layout of csrc/linear_float.c."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pegboard.ops.linear import FloatWeight
from pegboard_kernel_cpu.experts import NativeExperts
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.structures import ExpertsFloat, LinearFloat, LookupFloat
from pegboard_kernel_cpu.values import Call, new, rows_of, submit

GROUP = 16


class NativeFloatWeight(FloatWeight):
    """See `FloatWeight` for its life cycle. The packed matrix replaces the plain one, unless the
    matrix is also a table whose rows are looked up."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
    ) -> None:
        if dtype != torch.float32:
            raise ValueError(f"native float weights are float32 only, not {dtype}")
        super().__init__(shape, dtype, device, is_table)
        self._packed: Tensor | None = None

    def dense(self) -> Tensor:
        if self._plain is not None:
            return self._plain
        assert self._packed is not None, "either the plain or the packed matrix exists"
        dense = torch.empty(self.shape)
        library().unpack_linear_float(self._packed.data_ptr(), *self.shape, dense.data_ptr())
        return dense

    def finish(self) -> None:
        """Pack the matrix. A second call writes to the same addresses."""
        assert self._plain is not None, "call plain() before finish()"
        if self._packed is None:
            self._packed = torch.empty(-(-self.shape[0] // GROUP) * GROUP, self.shape[1])
        library().pack_linear_float(self._plain.data_ptr(), *self.shape, self._packed.data_ptr())
        if not self.is_table:
            self._plain = None

    def bind(self) -> "NativeFloatLinear":
        if self._packed is None:
            self.finish()
        assert self._packed is not None
        return NativeFloatLinear(self._packed, self.shape)

    def bind_experts(
        self, num_experts: int, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Matrices that are not whole groups of rows are computed one by one, from the plain
        matrix."""
        rows = self.shape[0] // num_experts
        columns = self.shape[1]
        if rows % GROUP:
            return super().bind_experts(num_experts, bias)
        self.bind()
        packed = self._packed
        assert packed is not None
        products = [
            LinearFloat(
                weight=packed[expert * rows :].data_ptr(),
                bias=None if bias is None else bias[expert].data_ptr(),
                rows=rows,
                columns=columns,
            )
            for expert in range(num_experts)
        ]
        return NativeExperts(
            "experts_float",
            ExpertsFloat,
            [(rows, products)],
            lambda x: ({"x": x}, []),
            (packed, bias),
        )

    def bind_lookup(self) -> "NativeFloatLookup":
        """Return [T] row indices → [T, in]. Call it only for a table."""
        return NativeFloatLookup(self.plain())

    def tensors(self) -> list[Tensor]:
        return [form for form in (self._plain, self._packed) if form is not None]


class NativeFloatLinear:
    """[T, in] → [T, out]."""

    def __init__(self, packed: Tensor, shape: tuple[int, int]) -> None:
        self.packed = packed
        self.shape = shape

    def __call__(self, x: Tensor) -> Tensor:
        (rows, columns) = self.shape
        x = rows_of(x)
        out = new(x, rows)
        arguments = LinearFloat(weight=self.packed.data_ptr(), rows=rows, columns=columns)
        submit(x, Call("linear_float", arguments, {"x": x}, {"out": out}, self.packed))
        return out


class NativeFloatLookup:
    """[T] row indices → [T, width]."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, ids: Tensor) -> Tensor:
        columns = self.table.shape[1]
        out = new(ids, columns)
        arguments = LookupFloat(table=self.table.data_ptr(), columns=columns)
        submit(ids, Call("lookup_float", arguments, {"ids": ids}, {"out": out}, self.table))
        return out
