"""What kernels compute on: tensors, or while a forward is recorded, stand-ins for them.

Every kernel of this package describes a call once, as `Call`s over whatever it was given, and hands them to `submit`. Calls over
tensors run at once. Calls over stand-ins are written down. A stand-in (`Value`) has a tensor's shape and strides, so that models
take views of it as usual, but no memory: whatever else is done with it refuses, and says what it was.
"""

from __future__ import annotations

import sys
from ctypes import Structure
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import CannotRecord
from pegboard_kernel_cpu.library import library


@dataclass(slots=True)
class Call:
    """One kernel call: which field of its arguments is which tensor [T, width]. Field names may be dotted ("to.codes");
    `<name>_stride` is set where the structure has it. A tensor that is both read and written stands in both. holds: what the
    arguments point into besides."""

    kernel: str
    arguments: Structure
    reads: dict[str, Any]
    writes: dict[str, Any]
    holds: Any = None

    def point(self) -> None:
        """Write the addresses of tensors into the arguments."""
        for fields in (self.reads, self.writes):
            for name, tensor in fields.items():
                set_place(self.arguments, name, tensor.data_ptr(), tensor.stride(0))


def set_place(arguments: Any, name: str, address: int, stride: int) -> None:
    """Write an address, and the elements from row to row where there is a field for them."""
    while "." in name:
        part, _, name = name.partition(".")
        arguments = getattr(arguments, part)
    setattr(arguments, name, address)
    if hasattr(arguments, f"{name}_stride"):
        setattr(arguments, f"{name}_stride", stride)


def submit(x: Tensor, *calls: Call) -> None:
    """Run the calls for as many tokens as x has rows, or write them down if it is a stand-in."""
    if type(x) is Value:
        for call in calls:
            x.recorder.emit(call)
        return
    for call in calls:
        call.point()
    library().team_run([(call.kernel, call.arguments) for call in calls], x.shape[0])


def new(x: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Room for a result [T, width], in the world of `x`."""
    return x.recorder.value(width, dtype) if type(x) is Value else torch.empty(x.shape[0], width, dtype=dtype)


def rows_of(x: Tensor) -> Tensor:
    """x [T, …] as [T, n] whose rows are contiguous; a view where possible."""
    flat = x if x.dim() == 2 else x.reshape(x.shape[0], -1)
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


@dataclass(eq=False, slots=True)
class Buffer:
    """Rows of token_bytes each. first, last: the calls that write it first and use it last. address: given for an input, else
    where it lies in the memory that recordings share."""

    token_bytes: int
    is_input: bool = False
    first: int = -1
    last: int = -1
    address: int = 0
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A rotary embedding that the kernel which takes the result applies."""

    source: Tensor
    cos: Tensor
    sin: Tensor
    pairs: bool


HOST_READS = frozenset(
    ("item", "tolist", "numpy", "cpu", "data_ptr", "__bool__", "__int__", "__float__", "__index__", "__array__")
)
COMPUTED = frozenset(("add_", "__iadd__", "embedding"))


class Value(torch.Tensor):
    """[T, …] of a buffer. meta: a tensor without memory that has its shape, strides and offset. place: equal for stand-ins of the
    same memory: buffer, bytes from the start of its row, elements of a row, elements from row to row."""

    recorder: Any
    buffer: Buffer
    meta: Tensor
    place: tuple[Buffer, int, int, int]

    @staticmethod
    def __new__(cls, recorder: Any, buffer: Buffer, meta: Tensor) -> Value:
        make: Any = torch.Tensor._make_wrapper_subclass
        geometry = {"strides": meta.stride(), "storage_offset": meta.storage_offset()}
        value: Value = make(cls, meta.shape, **geometry, dtype=meta.dtype, device="cpu")
        value.recorder, value.buffer, value.meta = recorder, buffer, meta
        offset, width = meta.storage_offset() * meta.element_size(), meta.numel() // meta.shape[0]
        value.place = buffer, offset, width, meta.stride(0)
        return value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Shapes and views are those of `meta`; a few functions have a kernel; all others refuse."""
        name = function.__name__
        if name in HOST_READS:
            raise refusal("reads memory" if name == "data_ptr" else "reads values on the host")
        values = [value for value in _leaves(args) if type(value) is cls]
        if not values:
            raise refusal(f"computes {name}")
        if name in COMPUTED or type(args[0]) is not cls:
            return values[0].recorder.compute(name, args)
        x = values[0]
        found = function(*(arg.meta if type(arg) is cls else arg for arg in args), **(kwargs or {}))
        if isinstance(found, Tensor):
            return x._view(found, name)
        if isinstance(found, list | tuple) and found and isinstance(found[0], Tensor):
            return [x._view(part, name) for part in found]
        return found

    def _view(self, view: Tensor, name: str) -> Value:
        """The same buffer seen as `view`. Raises CannotRecord when that is not a view but something computed."""
        if view.untyped_storage()._cdata != self.meta.untyped_storage()._cdata:
            raise refusal(f"computes {name}")
        return self if view is self.meta else Value(self.recorder, self.buffer, view)

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise refusal(f"computes {operator}")

    @property
    def offset(self) -> int:
        """Bytes from the start of the buffer's row."""
        return self.place[1]

    @property
    def is_whole(self) -> bool:
        _, offset, width, stride = self.place
        return offset == 0 and width == stride


def _leaves(args: Any) -> Any:
    for value in args:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def refusal(what: str) -> CannotRecord:
    """What cannot be recorded, with the function that does it: the innermost one outside of torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", __package__):
        frame = frame.f_back
    return CannotRecord(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname} {what}")
