"""Records a forward as a program: a list of kernel calls on buffers with fixed addresses, which one
C call replays.

While a model is recorded, it is called with stand-ins instead of tensors (see `values`), and each
kernel appends its calls to the list instead of computing. When the list is complete, every buffer
gets memory. Buffers that are never needed at the same time share it. Then the addresses are written
into the kernels' arguments. The number of tokens is read at each replay, so one program serves
every step that fits its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, addressof
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pegboard.ops.rounding import Rounding
from pegboard_kernel_cpu.constants import Computed, ConstantNotes, Constants
from pegboard_kernel_cpu.functions import FUNCTIONS, record
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.structures import (
    Beside,
    Instruction,
    Repeated,
    Rotate,
)
from pegboard_kernel_cpu.values import (
    Buffer,
    Call,
    Turn,
    Value,
    fields_of,
    new_quantized,
    new_words,
    quantize_call,
    refusal,
    set_place,
    submit,
)

ALIGNMENT = 64
MOST_VERIFIED = 256
"""Buffers for the logits of more tokens than this would take much memory."""
LINEAR = ("linear_float", "linear_blocks", "linear_codes")
"""Kernels that can add a bias."""


class NativeReplay:
    """See `pegboard.interfaces.platform.Replay`. Recordings share one memory, because only one runs
    at a time."""

    pads = False

    def __init__(self) -> None:
        self.arena = torch.empty(0, dtype=torch.uint8)
        self.programs: list[Program] = []

    def sizes(self, trait: str, largest: int) -> Sequence[int]:
        """Return only the largest size: one program serves every number of rows."""
        return (min(largest, MOST_VERIFIED) if trait == "verify" else largest,)

    def record(self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Program:
        recorder = Recorder(inputs[0].shape[0])
        with ConstantNotes() as notes:
            outputs = run(*(recorder.input(tensor) for tensor in inputs))
        program = Program(recorder, outputs, notes.computed)
        self.programs.append(program)
        if program.num_bytes + ALIGNMENT > self.arena.numel():
            self.arena = torch.zeros(program.num_bytes + ALIGNMENT, dtype=torch.uint8)
            for earlier in self.programs:
                earlier.move_to(self.arena)
        else:
            program.move_to(self.arena)
        return program

    def reset(self) -> None:
        self.programs.clear()


class Recorder:
    """The calls of a recording in progress. rows: number of rows of every buffer. keep: objects
    that own memory the calls point to."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.calls: list[Call] = []
        self.keep: list[Any] = []
        self._quantized: dict[tuple[Buffer, int, Rounding | None], tuple[Tensor, ...]] = {}
        self._words: dict[Buffer, Tensor] = {}
        self._turned: dict[Buffer, list[Value]] = {}

    def input(self, tensor: Tensor) -> Value:
        """Return the stand-in for a contiguous tensor [rows, …] whose contents change from step to
        step."""
        self.keep.append(tensor)
        buffer = Buffer(tensor[0].nbytes, is_input=True, address=tensor.data_ptr())
        return Value(self, buffer, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))

    def value(self, width: int, dtype: torch.dtype = torch.float32) -> Value:
        """Return a stand-in for a new result [T, width]."""
        return Value(
            self,
            Buffer(width * dtype.itemsize),
            torch.empty(self.rows, width, dtype=dtype, device="meta"),
        )

    def emit(self, call: Call) -> None:
        """Append a call, after the rotation of the channels that it reads and that are still to be
        rotated. Raises CannotRecord if it reads channels that were rotated in place."""
        for value in call.reads.values():
            assert isinstance(value, Value), (
                "a call needs stand-ins for all of its tensors or for none"
            )
            if value.buffer.turn is not None:
                self._rotate(value.buffer, value.buffer.turn)
            if any(_overlap(value, spent) for spent in self._turned.get(value.buffer, ())):
                raise refusal(f"passes channels that were rotated in place to {call.kernel}")
        self.calls.append(call)
        for value in call.writes.values():
            for key in [key for key in self._quantized if key[0] is value.buffer]:
                del self._quantized[key]
            self._words.pop(value.buffer, None)

    def computes(self, name: str) -> bool:
        """Return whether a function of torch makes a new result, rather than a view."""
        return name in FUNCTIONS

    def compute(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
        """Record a function of torch on stand-ins. Raises CannotRecord if no kernel computes the
        same."""
        return record(name, args, kwargs)

    def _makers(self, y: Any) -> list[Call]:
        """Return the linear kernels that wrote y, [] if others wrote it too or if it was read
        already."""
        if type(y) is not Value or not y.is_whole:
            return []
        if any(value.buffer is y.buffer for call in self.calls for value in call.reads.values()):
            return []
        makers = [
            call
            for call in self.calls
            if any(value.buffer is y.buffer for value in call.writes.values())
        ]
        return [] if any(call.kernel not in LINEAR for call in makers) else makers

    def joined(self, parts: Sequence[Any]) -> Value | None:
        """Let the linear kernels that wrote the parts [T, width] write them next to each other.
        Returns None if a part was not written by such kernels alone."""
        makers = [self._makers(part) for part in parts]
        if (
            not all(makers)
            or any(part.dim() != 2 for part in parts)
            or len({id(part.buffer) for part in parts}) < len(parts)
        ):
            return None
        joined: Value = self.value(sum(part.shape[1] for part in parts))
        start = 0
        for part, calls in zip(parts, makers, strict=True):
            for call in calls:
                out = call.writes["out"]
                first = start + out.offset // out.element_size()
                call.writes["out"] = joined[:, first : first + out.shape[1]]
            start += part.shape[1]
        return joined

    def add_bias(self, y: Any, bias: Any) -> bool:
        """Let the linear kernels that wrote y add the bias. Returns False if y was not written by
        such kernels alone."""
        makers = self._makers(y)
        if (
            not makers
            or type(bias) is Value
            or bias.shape != y.shape[1:]
            or not bias.is_contiguous()
        ):
            return False
        if any(call.arguments.bias for call in makers):
            return False
        self.keep.append(bias)
        for call in makers:
            call.arguments.bias = bias.data_ptr() + call.writes["out"].offset
        return True

    def turned(self, x: Value, cos: Tensor, sin: Tensor, pairs: bool) -> Value:
        """Return a stand-in for x [T, H, D] with its channels rotated. Attention that takes it
        rotates them. For other kernels, a call of its own does."""
        out = self.value(x.numel() // self.rows)
        out.buffer.turn = Turn(x, cos, sin, pairs)
        return out.view(x.shape)

    def _rotate(self, buffer: Buffer, turn: Turn) -> None:
        """Record a rotation, for a kernel that cannot rotate by itself."""
        _, heads, width = turn.source.shape
        if turn.source.stride(2) != 1:
            raise refusal("rotates channels that are not next to each other")
        buffer.turn = None
        arguments = Rotate(
            heads=heads,
            head_stride=turn.source.stride(1),
            width=width,
            rotary_pairs=turn.cos.shape[1],
            pairs=turn.pairs,
        )
        reads = {"x": turn.source, "cos": turn.cos, "sin": turn.sin}
        shape = torch.empty(self.rows, heads * width, dtype=torch.float32, device="meta")
        out = Value(self, buffer, shape)
        self.emit(Call("rotate", arguments, reads, {"out": out}))

    def take_turn(self, *values: Tensor | None) -> tuple[list[Tensor | None], Turn | None]:
        """Return the values before their rotation, and the rotation, which must be the same for
        all. Values that are not to be rotated are returned as they are, with None. Raises
        CannotRecord if the rotations differ."""
        turns = [value.buffer.turn if type(value) is Value else None for value in values]
        first = turns[0]
        ways = {
            (id(turn.cos), id(turn.sin), turn.pairs) if turn else None
            for turn, x in zip(turns, values, strict=True)
            if x is not None
        }
        if len(ways) > 1:
            raise refusal("rotates queries and keys in different ways")
        return [turn.source if turn else x for turn, x in zip(turns, values, strict=True)], first

    def spend(self, value: Value) -> None:
        """Note that the value's channels have been rotated in place. No later call can read them
        unrotated."""
        self._turned.setdefault(value.buffer, []).append(value)

    def quantized(
        self, value: Value, order: Tensor | None = None, rounding: Rounding | None = None
    ) -> tuple[Tensor, ...]:
        """Return the parts of `value` in quantized form (csrc/quantize.h), with its columns in
        another order, or rounded as a checkpoint asks, if that is given. If the kernel that
        computes the value can quantize it, it does; otherwise a separate call is appended."""
        key = value.buffer, 0 if order is None else order.data_ptr(), rounding
        known = self._quantized.get(key)
        if known is not None and value.is_whole:
            return known
        parts = new_quantized(value, rounding)
        fields = fields_of(parts)
        if rounding is None:
            self._write(value, order, fields)
        else:
            submit(value, quantize_call(value, order, fields, rounding))
        if value.is_whole:
            self._quantized[key] = parts
        return parts

    def words(self, value: Value) -> Tensor:
        """Return `value` as bfloat16 numbers (csrc/quantize.h)."""
        known = self._words.get(value.buffer)
        if known is not None and value.is_whole:
            return known
        words = new_words(value)
        self._write(value, None, {"to.words": words})
        if value.is_whole:
            self._words[value.buffer] = words
        return words

    def _write(self, value: Value, order: Tensor | None, fields: dict[str, Tensor]) -> None:
        """Have the value written in another form: by the kernel that computes it, if it can, and
        otherwise by a separate call."""
        producer = self._producer(value) if order is None else None
        can_write = (
            producer is not None
            and hasattr(producer.arguments, "to")
            and not producer.writes.keys() & fields.keys()
        )
        if producer is not None and can_write:
            producer.writes.update(fields)
        else:
            submit(value, quantize_call(value, order, fields))

    def _producer(self, value: Value) -> Call | None:
        """Return the call that wrote the value last, or None if no call wrote exactly the value."""
        for call in reversed(self.calls):
            for name, written in call.writes.items():
                if written.buffer is value.buffer:
                    return call if name == "out" and written.place == value.place else None
        return None


def _overlap(one: Value, other: Value) -> bool:
    (_, first, width, _) = one.place
    (_, second, size, _) = other.place
    return first < second + 4 * size and second < first + 4 * width


def _can_run_beside(other: Call | None, call: Call) -> bool:
    """Return whether the tasks of `call` can run at the same time as those of the call before
    it."""
    if other is None or not call.can_join or other.can_join or call.copies > 1 or other.copies > 1:
        return False
    written = {value.buffer for value in other.writes.values()}
    used = {value.buffer for value in (*call.reads.values(), *call.writes.values())}
    return not written & used and not {value.buffer for value in call.writes.values()} & {
        v.buffer for v in other.reads.values()
    }


class Program:
    """See `pegboard.interfaces.platform.Recording`."""

    def __init__(
        self, recorder: Recorder, outputs: tuple[Tensor, ...], computed: Sequence[Computed] = ()
    ) -> None:
        for output in outputs:
            if type(output) is not Value or output.dim() != 2 or output.buffer.turn is not None:
                raise refusal("returns something that no kernel has computed")
        self.size = recorder.rows
        self.calls = recorder.calls
        self._keep = recorder.keep
        self._checks = tuple({call.check: None for call in self.calls if call.check is not None})
        held = [call.holds for call in self.calls]
        self._constants = Constants(computed, [*held, *recorder.keep])
        self.library = library()
        self._outputs: list[Any] = list(outputs)
        self._drop_unused()
        self._joins = [_can_run_beside(*pair) for pair in pairwise([None, *self.calls])]
        self._lifetimes()
        self.buffers, self.num_bytes = self._place()
        self._instructions = (Instruction * 0)()
        self._due: list[tuple[str, Structure]] = []
        self._tensors: list[Tensor] = []
        self._views: tuple[Tensor, ...] = ()
        self._num_rows = -1

    def __call__(self, num_rows: int) -> tuple[Tensor, ...]:
        if num_rows != self._num_rows:
            self._num_rows, self._views = (
                num_rows,
                tuple(tensor[:num_rows] for tensor in self._tensors),
            )
        if self._constants.sources:
            self._constants.refresh()
        self.library.run(self._instructions, len(self._due), num_rows)
        for check in self._checks:
            check()
        return self._views

    def move_to(self, arena: Tensor) -> None:
        """Move the buffers into this memory and write all addresses into the kernels' arguments."""
        base = -(-arena.data_ptr() // ALIGNMENT) * ALIGNMENT
        for call in self.calls:
            for name, value in (*call.reads.items(), *call.writes.items()):
                buffer, offset, _, stride = value.place
                set_place(
                    call.arguments,
                    name,
                    buffer.address + offset + (0 if buffer.is_input else base),
                    stride,
                )
        self._due = []
        for call, joins in zip(self.calls, self._joins, strict=True):
            self._due.append(self._beside(self._due.pop(), call) if joins else self._due_call(call))
        self._instructions = self.library.instructions(self._due)
        self._tensors = [
            self._tensor(value, arena, base - arena.data_ptr()) for value in self._outputs
        ]
        self._num_rows = -1

    def _due_call(self, call: Call) -> tuple[str, Structure]:
        """Return the kernel and the arguments that run a call."""
        if call.copies == 1:
            return call.kernel, call.arguments
        return "repeated", Repeated(
            self.library.address(call.kernel), addressof(call.arguments), call.copies
        )

    def _beside(self, other: tuple[str, Structure], call: Call) -> tuple[str, Structure]:
        """Return the kernel and the arguments that run `other` and the tasks of a call at the same
        time."""
        address = self.library.address
        count = address(f"{call.kernel}_count")
        run = address(f"{call.kernel}_task")
        return "beside", Beside(
            address(other[0]), addressof(other[1]), count, run, addressof(call.arguments)
        )

    def _tensor(self, value: Value, arena: Tensor, start: int) -> Tensor:
        """Return the value's memory as a tensor [rows, width]."""
        buffer, offset, width, _ = value.place
        start += buffer.address
        rows = arena[start : start + self.size * buffer.token_bytes].view(self.size, -1)
        size = value.element_size()
        return rows[:, offset : offset + width * size].view(value.dtype)

    def _drop_unused(self) -> None:
        """Do not write a float result if only its other forms are read."""
        read = {value.buffer for call in self.calls for value in call.reads.values()}
        read |= {output.buffer for output in self._outputs}
        for call in self.calls:
            if (
                call.writes.keys() & {"to.codes", "to.words"}
                and "out" in call.writes
                and call.writes["out"].buffer not in read
            ):
                del call.writes["out"]

    def _lifetimes(self) -> None:
        for index, (call, joins) in enumerate(zip(self.calls, self._joins, strict=True)):
            index -= joins
            for value in (*call.reads.values(), *call.writes.values()):
                buffer = value.buffer
                buffer.first = index if buffer.first < 0 else buffer.first
                buffer.last = index
        for output in self._outputs:
            output.buffer.last = len(self.calls)

    def _place(self) -> tuple[list[Buffer], int]:
        """Place the buffers by first fit: each takes the lowest place that no buffer needed at the
        same time overlaps. Returns the buffers and the number of bytes that they take together."""
        used = [
            value.buffer
            for call in self.calls
            for value in (*call.reads.values(), *call.writes.values())
        ]
        buffers = [buffer for buffer in dict.fromkeys(used) if not buffer.is_input]
        alive: list[tuple[int, int, Buffer]] = []
        total = 0
        for buffer in sorted(buffers, key=lambda b: (b.first, -b.token_bytes)):
            size = -(-buffer.token_bytes * self.size // ALIGNMENT) * ALIGNMENT
            alive = sorted(
                (entry for entry in alive if entry[2].last >= buffer.first),
                key=lambda entry: entry[0],
            )
            start = 0
            for low, high, _ in alive:
                if start + size <= low:
                    break
                start = max(start, high)
            buffer.address = start
            alive.append((start, start + size, buffer))
            total = max(total, start + size)
        return buffers, total
