"""A float32 matrix in the packed layout of csrc/linear_float.c."""

from __future__ import annotations

import torch
from torch import Tensor

from pegboard.ops.linear import FloatWeight
from pegboard_kernel_cpu.elementwise import rows_of
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.recorder import NativeRecorder, TokenIds, Value
from pegboard_kernel_cpu.structures import LinearFloat, LookupFloat

GROUP = 16


class NativeFloatWeight(FloatWeight):
    """See `FloatWeight` for its life cycle. The packed matrix replaces the plain one unless rows are also looked up."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str, keep_plain: bool = False) -> None:
        if dtype != torch.float32:
            raise ValueError(f"native float weights are float32 only, not {dtype}")
        super().__init__(shape, dtype, device, keep_plain)
        self._packed: Tensor | None = None

    def dense(self) -> Tensor:
        if self._plain is not None:
            return self._plain
        assert self._packed is not None, "one of the two exists"
        dense = torch.empty(self.shape)
        library().unpack_linear_float(self._packed.data_ptr(), *self.shape, dense.data_ptr())
        return dense

    def finish(self) -> None:
        """Pack the matrix. A second call writes to the same addresses."""
        assert self._plain is not None, "call plain() before finish()"
        if self._packed is None:
            self._packed = torch.empty(-(-self.shape[0] // GROUP) * GROUP, self.shape[1])
        library().pack_linear_float(self._plain.data_ptr(), *self.shape, self._packed.data_ptr())
        if not self.keep_plain:
            self._plain = None

    def bind(self) -> "NativeFloatLinear":
        if self._packed is None:
            self.finish()
        assert self._packed is not None
        return NativeFloatLinear(self._packed, self.shape)

    def bind_lookup(self) -> "NativeFloatLookup":
        """[T] row indices → [T, in]; needs keep_plain."""
        return NativeFloatLookup(self.plain())

    @property
    def nbytes(self) -> int:
        return sum(form.nbytes for form in (self._plain, self._packed) if form is not None)


class NativeFloatLinear:
    """[T, in] → [T, out]."""

    def __init__(self, packed: Tensor, shape: tuple[int, int]) -> None:
        self.packed, self.shape = packed, shape

    def _arguments(self, bias: Tensor | None = None) -> LinearFloat:
        rows, columns = self.shape
        address = None if bias is None else bias.data_ptr()
        return LinearFloat(weight=self.packed.data_ptr(), bias=address, rows=rows, columns=columns)

    def __call__(self, x: Tensor) -> Tensor:
        x = rows_of(x)
        out = torch.empty(x.shape[0], self.shape[0])
        arguments = self._arguments()
        arguments.x, arguments.x_stride, arguments.out, arguments.out_stride = (
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
        )
        library().team_run([("linear_float", arguments)], x.shape[0])
        return out

    def record(self, recorder: NativeRecorder, x: Value, bias: Tensor | None = None) -> Value:
        out = recorder.value(self.shape[0])
        recorder.keep += [self.packed, bias]
        recorder.emit("linear_float", self._arguments(bias), {"x": x}, {"out": out})
        return out


class NativeFloatLookup:
    """[T] row indices → [T, width]."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, ids: Tensor) -> Tensor:
        out = torch.empty(ids.shape[0], self.table.shape[1])
        arguments = LookupFloat(
            ids=ids.data_ptr(), out=out.data_ptr(), out_stride=out.stride(0), table=self.table.data_ptr(), columns=out.shape[1]
        )
        library().team_run([("lookup_float", arguments)], ids.shape[0])
        return out

    def record(self, recorder: NativeRecorder, ids: TokenIds) -> Value:
        recorder.keep.append(self.table)
        return recorder.embed("lookup_float", LookupFloat(table=self.table.data_ptr(), columns=self.table.shape[1]))
