"""A matrix of floats of 32 or 16 bits in the packed layouts of csrc/float_tiles.h."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.interfaces.quantization import ExpertMemory
from pegboard.ops.linear import FloatWeight
from pegboard_kernel_cpu.experts import NativeExperts
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.pages import matrix
from pegboard_kernel_cpu.structures import ExpertsFloat, LinearFloat, LookupPacked
from pegboard_kernel_cpu.values import Call, new, rows_of, submit, words_of

GROUP = 16
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In the order of the enumeration in csrc/float_tiles.h."""


class NativeFloatWeight(FloatWeight):
    """See `FloatWeight` for its life cycle. The packed matrix replaces the plain one."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
        activations: torch.dtype = torch.float32,
    ) -> None:
        if dtype not in TYPES or activations != torch.float32:
            raise ValueError(
                f"native float weights are float32, bfloat16 or float16, not {dtype}, and multiply "
                f"float32 activations, not {activations}"
            )
        super().__init__(shape, dtype, device, is_table, activations)
        self.type = TYPES.index(dtype)
        self._packed: Tensor | None = None
        self._stays_plain = False

    def dense(self) -> Tensor:
        if self._plain is not None:
            return self._plain
        assert self._packed is not None, "either the plain or the packed matrix exists"
        dense = torch.empty(self.shape, dtype=self.dtype)
        library().unpack_linear_float(
            self._packed.data_ptr(), *self.shape, self.type, dense.data_ptr()
        )
        return dense

    def finish(self) -> None:
        """Pack the matrix. A second call writes to the same addresses."""
        assert self._plain is not None, "call plain() before finish()"
        if self._stays_plain:
            return
        rows, columns = self.shape
        if self._packed is None:
            # bfloat16 numbers are packed in pairs
            width = columns + columns % 2 if self.dtype == torch.bfloat16 else columns
            self._packed = matrix((-(-rows // GROUP) * GROUP, width), self.dtype)
        library().pack_linear_float(
            self._plain.data_ptr(), rows, columns, self.type, self._packed.data_ptr()
        )
        self._plain = None

    def packed(self) -> Tensor:
        """Return the packed matrix."""
        if self._packed is None:
            self.finish()
        assert self._packed is not None
        return self._packed

    def bind(self) -> "NativeFloatLinear":
        return NativeFloatLinear(self.packed(), self.shape, self.type)

    def bind_experts(
        self, num_experts: int, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Matrices that are not whole groups of rows are computed one by one, from the plain
        matrix."""
        rows = self.shape[0] // num_experts
        columns = self.shape[1]
        if rows % GROUP:
            self._keep_plain()
            return super().bind_experts(num_experts, bias)
        packed = self.packed()
        products = [
            LinearFloat(
                weight=packed[expert * rows :].data_ptr(),
                bias=None if bias is None else bias[expert].data_ptr(),
                rows=rows,
                columns=columns,
                type=self.type,
            )
            for expert in range(num_experts)
        ]
        return NativeExperts(
            "experts_float",
            ExpertsFloat,
            [(rows, products)],
            self._inputs,
            (packed, bias),
        )

    def _keep_plain(self) -> None:
        self.plain()
        self._packed = None
        self._stays_plain = True

    def expert_memory(self, num_experts: int) -> ExpertMemory | None:
        """See `MovableExpertsMethod`."""
        if self.shape[0] // num_experts % GROUP:
            self._keep_plain()
            return super().expert_memory(num_experts)
        experts = self.packed().view(num_experts, -1)
        return ExpertMemory(["packed", self.type, *self.shape], [[expert] for expert in experts])

    def _inputs(self, x: Tensor) -> tuple[dict[str, Tensor], list[Call]]:
        return _inputs(x, self.type)

    def bind_lookup(self) -> "NativeFloatLookup":
        """Return [T] row indices → [T, in]."""
        return NativeFloatLookup(self.packed(), self.shape[1], self.type)

    def tensors(self) -> list[Tensor]:
        return [form for form in (self._plain, self._packed) if form is not None]


class InvariantFloatWeight(NativeFloatWeight):
    """Refuses experts that torch would multiply, because those results depend on the batch."""

    def _keep_plain(self) -> None:
        raise ConfigError(
            f"batch_invariant: experts of {self.shape[0]} rows together are computed only in whole "
            f"groups of {GROUP} rows each"
        )


class NativeFloatLinear:
    """[T, in] → [T, out]."""

    def __init__(self, packed: Tensor, shape: tuple[int, int], type: int) -> None:
        self.packed = packed
        self.shape = shape
        self.type = type

    def __call__(self, x: Tensor) -> Tensor:
        (rows, columns) = self.shape
        x = rows_of(x)
        out = new(x, rows)
        arguments = LinearFloat(
            weight=self.packed.data_ptr(), rows=rows, columns=columns, type=self.type
        )
        reads, calls = _inputs(x, self.type)
        submit(x, *calls, Call("linear_float", arguments, reads, {"out": out}, self.packed))
        return out


def _inputs(x: Tensor, type: int) -> tuple[dict[str, Tensor], list[Call]]:
    """Return what a product with weights of this type reads of x, and the calls that must run
    before."""
    reads, calls = words_of(x) if TYPES[type] == torch.bfloat16 else ({}, [])
    return reads or {"x": x}, calls


class NativeFloatLookup:
    """[T] row indices → [T, width]."""

    def __init__(self, packed: Tensor, columns: int, type: int) -> None:
        self.packed = packed
        self.columns = columns
        self.type = type

    def __call__(self, ids: Tensor) -> Tensor:
        out = new(ids, self.columns)
        arguments = LookupPacked(
            weight=self.packed.data_ptr(), columns=self.columns, type=self.type
        )
        submit(ids, Call("lookup_packed", arguments, {"ids": ids}, {"out": out}, self.packed))
        return out
