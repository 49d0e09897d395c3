"""What kernels compute on: tensors, or stand-ins for tensors while a forward is recorded.

Every kernel of this package describes its work as `Call`s on what it was given, and hands them to
`submit`. Calls on tensors run at once. Calls on stand-ins are appended to the recording. A stand-in
(`Value`) has a tensor's shape and strides but no memory. A model can take views of it as usual;
every other operation raises CannotRecord, which names the operation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from ctypes import Structure
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from pegboard.errors import CannotRecord
from pegboard.ops.rounding import Rounding
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.structures import WORDS_GAP, Quantize

TILE_COLUMNS = 32


@dataclass(slots=True)
class Call:
    """One kernel call: which tensor [T, width] each field of its arguments points to. Field names
    may be dotted ("to.codes"). `<name>_stride` is also set if the structure has it. A tensor that
    is both read and written is in `reads` and in `writes`. holds: another object whose memory the
    arguments point to. copies: rows per token of the step, if it is recorded. can_join: whether the
    C source has `<kernel>_count` and `<kernel>_task`, so that its tasks can run beside those of
    another kernel. check: called after the kernel has run; it raises what the kernel could not."""

    kernel: str
    arguments: Structure
    reads: dict[str, Any]
    writes: dict[str, Any]
    holds: Any = None
    copies: int = 1
    can_join: bool = False
    check: Callable[[], None] | None = None

    def point(self) -> None:
        """Write the addresses of the tensors into the arguments."""
        for fields in (self.reads, self.writes):
            for name, tensor in fields.items():
                set_place(self.arguments, name, tensor.data_ptr(), tensor.stride(0))


def set_place(arguments: Any, name: str, address: int, stride: int) -> None:
    """Write an address into a field, and the number of elements from row to row into its stride
    field, if there is one."""
    while "." in name:
        part, _, name = name.partition(".")
        arguments = getattr(arguments, part)
    setattr(arguments, name, address)
    if hasattr(arguments, f"{name}_stride"):
        setattr(arguments, f"{name}_stride", stride)


def submit(x: Tensor, *calls: Call) -> None:
    """Run the calls for as many tokens as x has rows. If x is a stand-in, append them to its
    recording instead."""
    if type(x) is Value:
        for call in calls:
            call.copies = x.copies
            x.recorder.emit(call)
        return
    for call in calls:
        call.point()
    library().team_run([(call.kernel, call.arguments) for call in calls], x.shape[0])
    for call in calls:
        if call.check is not None:
            call.check()


def new(x: Tensor, width: int, dtype: torch.dtype = torch.float32, copies: int = 1) -> Tensor:
    """Return memory for a result [T · copies, width], if x has T rows: a tensor, or a stand-in if x
    is one."""
    rows = x.shape[0] * copies
    if type(x) is not Value:
        return torch.empty(rows, width, dtype=dtype)
    out: Tensor = x.recorder.value(width * copies * x.copies, dtype)
    return out.view(rows, width) if copies * x.copies > 1 else out


def new_quantized(x: Tensor, rounding: Rounding | None = None) -> tuple[Tensor, ...]:
    """Return memory for x as the products with integers read it: the parts of csrc/quantize.h, of
    which only levels with matrix tiles have the last one. Tiles do not round as a checkpoint
    asks."""
    width = x.shape[1]
    parts = new(x, width, torch.int8), new(x, width // 32), new(x, width // 16)
    return (*parts, new_words(x)) if library().has_tiles and rounding is None else parts


def words_of(x: Tensor) -> tuple[dict[str, Tensor], list[Call]]:
    """Return x as matrix tiles read it, or nothing on a level without them or if the columns do not
    fill tiles, and the calls that must run before."""
    if not library().has_tiles or x.shape[1] % TILE_COLUMNS:
        return {}, []
    if type(x) is Value:
        return {"x_words": x.recorder.words(x)}, []
    words = new_words(x)
    return {"x_words": words}, [quantize_call(x, None, {"to.words": words})]


def new_words(x: Tensor) -> Tensor:
    """Return memory for x as bfloat16 numbers (csrc/quantize.h)."""
    return new(x, x.shape[1] + WORDS_GAP, torch.bfloat16)


def fields_of(parts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return these parts by the names of their fields where they are written."""
    return dict(zip(("to.codes", "to.scales", "to.sums", "to.words"), parts, strict=False))


def quantize_call(
    x: Tensor, order: Tensor | None, to: dict[str, Tensor], rounding: Rounding | None = None
) -> Call:
    """Return the call that quantizes x (csrc/quantize.h). order: int64 [columns]; None = its own.
    rounding: to int8, of columns in their order; None = per token and 32 columns."""
    arguments = Quantize(columns=x.shape[1], order=None if order is None else order.data_ptr())
    if rounding is not None:
        arguments.group = rounding.group or x.shape[1]
        arguments.scale = rounding.scale or 0
    return Call("quantize", arguments, {"x": x}, to, order)


def rows_of(x: Tensor) -> Tensor:
    """Return x [T, …] as [T, n] with contiguous rows. It is a view if possible."""
    flat = x if x.dim() == 2 else x.reshape(x.shape[0], -1)
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory with one row of token_bytes for each token. first, last: index of the first and the
    last call that use it. address: the tensor's address for an input, else the offset in the memory
    that recordings share. turn: a rotation that is still to be applied."""

    token_bytes: int
    is_input: bool = False
    first: int = -1
    last: int = -1
    address: int = 0
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A rotary embedding of `source`. The kernel that takes the result applies it."""

    source: Tensor
    cos: Tensor
    sin: Tensor
    pairs: bool


HOST_READS = frozenset(
    (
        "item",
        "tolist",
        "numpy",
        "cpu",
        "data_ptr",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
    )
)
UNKNOWN = ("alpha", "inplace", "out", "rounding_mode")
"""Arguments that change what a function computes."""


class Value(torch.Tensor):
    """[T, …] of a buffer. meta: a tensor without memory that has the value's shape, strides and
    offset. place: the buffer, the byte offset in its row, the number of elements of a row, and the
    number of elements from row to row. Stand-ins for the same memory have equal places."""

    recorder: Any
    buffer: Buffer
    meta: Tensor
    place: tuple[Buffer, int, int, int]

    @staticmethod
    def __new__(cls, recorder: Any, buffer: Buffer, meta: Tensor) -> Value:
        make: Any = torch.Tensor._make_wrapper_subclass
        geometry = {"strides": meta.stride(), "storage_offset": meta.storage_offset()}
        value: Value = make(cls, meta.shape, **geometry, dtype=meta.dtype, device="cpu")
        value.recorder = recorder
        value.buffer = buffer
        value.meta = meta
        offset = meta.storage_offset() * meta.element_size()
        width = meta.numel() // meta.shape[0]
        value.place = buffer, offset, width, meta.stride(0)
        return value

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Take shapes and views from `meta`. A few other functions have a kernel. All others raise
        CannotRecord."""
        name = function.__name__
        if name in HOST_READS:
            raise refusal("reads memory" if name == "data_ptr" else "reads values on the host")
        if kwargs and (
            given := next(
                (key for key in UNKNOWN if kwargs.get(key) and (key, kwargs[key]) != ("alpha", 1)),
                None,
            )
        ):
            raise refusal(f"computes {name} with {given}={kwargs[given]!r}")
        values = [value for value in leaves(args) if type(value) is cls]
        if not values:
            raise refusal(f"computes {name}")
        recorder = values[0].recorder
        if type(args[0]) is not cls or recorder.computes(name):
            return recorder.compute(name, args, kwargs or {})
        x = values[0]
        if isinstance(function, OpOverload):  # of a library, which may take no meta tensors
            raise refusal(f"computes {name}")
        result = function(*map(_without_memory, args), **(kwargs or {}))
        if isinstance(result, Tensor):
            return x._view(result, name)
        if isinstance(result, list | tuple) and result and isinstance(result[0], Tensor):
            return [x._view(part, name) for part in result]
        return result

    def _view(self, view: Tensor, name: str) -> Value:
        """Return the same buffer seen as `view`. Raises CannotRecord if that is not a view but a
        computed result."""
        if view.untyped_storage()._cdata != self.meta.untyped_storage()._cdata:
            if name in ("contiguous", "reshape"):
                copy: Value = self.recorder.compute("contiguous", (self,), {})
                return copy.view(view.shape)  # type: ignore[return-value]
            raise refusal(f"computes {name}")
        return self if view is self.meta else Value(self.recorder, self.buffer, view)

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise refusal(f"computes {operator}")

    @property
    def copies(self) -> int:
        """Number of rows for each row of the recording."""
        return int(self.shape[0]) // int(self.recorder.rows)

    @property
    def offset(self) -> int:
        """Number of bytes from the start of the buffer's row."""
        return self.place[1]

    @property
    def is_whole(self) -> bool:
        _, offset, width, stride = self.place
        return offset == 0 and width == stride


def _without_memory(argument: Any) -> Any:
    if type(argument) is Value:
        return argument.meta
    return argument.to("meta") if isinstance(argument, Tensor) else argument


def leaves(args: Any) -> Any:
    """Yield what is in a list, and in the lists and tuples in it."""
    for value in args:
        if isinstance(value, list | tuple):
            yield from leaves(value)
        else:
            yield value


def refusal(what: str) -> CannotRecord:
    """Return an error that says what cannot be recorded, and in which function: the innermost one
    outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "torch",
        __package__,
    ):
        frame = frame.f_back
    return CannotRecord(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname} {what}")
