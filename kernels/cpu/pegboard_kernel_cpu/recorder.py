"""Recording a forward as a program: a list of kernel calls over buffers that stay where they are, replayed by one C call.

While a model is recorded its layers are called with `Value`s instead of tensors. A value is a place in a buffer nobody has put
anywhere yet; the kernels that would compute it append themselves to the list. When the list is complete every buffer gets
memory, shared by those that are never needed at the same time, and the addresses are written into the kernels' arguments.
Token counts are read at replay, so one program serves every step up to the size of its buffers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import sizeof
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pegboard_kernel_cpu.library import Library, library
from pegboard_kernel_cpu.structures import Instruction, LookupBlocks, LookupFloat, Quantize

ALIGNMENT = 64


@dataclass(eq=False, slots=True)
class Buffer:
    """token_bytes: of one token's row; rows: how many. first, last: the calls that write it first and use it last."""

    token_bytes: int
    rows: int
    first: int = -1
    last: int = -1
    address: int = 0


@dataclass(frozen=True, slots=True)
class Value:
    """[T, width] elements of a buffer's rows, `offset` bytes behind their start. stride: elements from row to row."""

    buffer: Buffer
    width: int
    stride: int
    offset: int = 0

    def columns(self, start: int, stop: int) -> "Value":
        """[T, stop − start] of it (float32)."""
        return replace(self, offset=self.offset + 4 * start, width=stop - start)

    @property
    def is_whole(self) -> bool:
        return self.offset == 0 and self.width == self.stride


@dataclass(slots=True)
class Call:
    """One kernel call: which field of its arguments is which value."""

    kernel: str
    arguments: ctypes.Structure
    reads: dict[str, Value]
    writes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class QuantizedValue:
    """Activations as int8 with scales and sums, see csrc/quantize.h."""

    codes: Value
    scales: Value
    sums: Value


class TokenIds:
    """The step's token ids, whose place is told to the program in every step."""


class NativeRecorder:
    """max_tokens: the most tokens of a step; buffers are that long. keep: objects whose memory the calls point into."""

    def __init__(self, max_tokens: int) -> None:
        self.library: Library = library()
        self.max_rows = max_tokens
        self.calls: list[Call] = []
        self.lookups: list[LookupFloat] = []
        self.embeddings: list[LookupFloat | LookupBlocks] = []
        self.keep: list[Any] = []
        self._quantized: dict[Buffer, QuantizedValue] = {}
        self._hidden: Value | None = None
        self.entry = 0
        self.head_start: int | None = None

    def token_ids(self) -> TokenIds:
        """What `embed` takes."""
        return TokenIds()

    def embed(self, kernel: str, arguments: "LookupFloat | LookupBlocks") -> Value:
        """Rows of a table; the call learns in every step where its token ids are."""
        value = self.value(arguments.columns)
        self.embeddings.append(arguments)
        self.emit(kernel, arguments, reads={}, writes={"out": value})
        return value

    def enter(self, hidden: Value) -> None:
        """The program may also be entered with these hidden states given."""
        self._hidden, self.entry = hidden, len(self.calls)

    def hidden(self, width: int) -> Value:
        """The hidden states the program starts from; what was recorded before is forgotten."""
        for recorded in (self.calls, self.lookups, self.embeddings, self.keep, self._quantized):
            recorded.clear()
        self.enter(self.value(width))
        assert self._hidden is not None
        return self._hidden

    def at_positions(self, tables: tuple[Tensor, ...]) -> tuple[Value, ...]:
        """Rows of tables [max_positions, width]; the calls learn in every step where its positions are."""
        values = tuple(self.value(table.shape[1]) for table in tables)
        for table, value in zip(tables, values, strict=True):
            lookup = LookupFloat(table=table.data_ptr(), columns=table.shape[1])
            self.lookups.append(lookup)
            self.keep.append(table)
            self.emit("lookup_float", lookup, reads={}, writes={"out": value})
        return values

    def value(self, width: int, element_bytes: int = 4) -> Value:
        """A new [T, width]."""
        return Value(Buffer(width * element_bytes, self.max_rows), width, width)

    def head(self, hidden: Value, max_rows: int) -> Value:
        """What follows computes on up to so many rows of `hidden`: other ones, maybe, than those the forward left there."""
        self.head_start, self.max_rows = len(self.calls), max_rows
        self._quantized.clear()
        return hidden

    def emit(self, kernel: str, arguments: ctypes.Structure, reads: Mapping[str, Value], writes: Mapping[str, Value]) -> None:
        """Append a call. Field names may be dotted ("to.codes"); `<name>_stride` is set where the structure has it. A value
        that is both read and written stands in both."""
        self.calls.append(Call(kernel, arguments, dict(reads), dict(writes)))
        for value in writes.values():
            self._quantized.pop(value.buffer, None)

    def quantized(self, value: Value) -> QuantizedValue:
        """`value` as int8, made by the kernel that computes it where that one can, else by a call of its own."""
        known = self._quantized.get(value.buffer)
        if known is not None and value.is_whole:
            return known
        made = QuantizedValue(self.value(value.width, 1), self.value(value.width // 32), self.value(value.width // 16))
        fields = {"to.codes": made.codes, "to.scales": made.scales, "to.sums": made.sums}
        producer = self._producer(value)
        if producer is not None and hasattr(producer.arguments, "to"):
            producer.writes.update(fields)
        else:
            self.emit("quantize", Quantize(columns=value.width), {"x": value}, fields)
        if value.is_whole:
            self._quantized[value.buffer] = made
        return made

    def _producer(self, value: Value) -> Call | None:
        """The call that wrote the value last, if it wrote exactly that."""
        for call in reversed(self.calls[self.head_start or 0 :]):
            for name, written in call.writes.items():
                if written.buffer is value.buffer:
                    return call if name == "out" and written == value else None
        return None

    def finish(self, output: Value, logits: Value | None = None) -> "Program":
        """Give every buffer memory and bind all addresses."""
        assert self._hidden is not None, "a program can be entered with hidden states"
        if logits is None:
            del self.calls[len(self.calls) if self.head_start is None else self.head_start :]
        outputs = [output] if logits is None else [output, logits]
        self._drop_unused(outputs)
        self._lifetimes(outputs)
        arena = self._place()
        for call in self.calls:
            for name, value in (call.reads | call.writes).items():
                _point(call.arguments, name, value)
        return Program(self, arena, self._hidden, output, logits)

    def _drop_unused(self, outputs: Sequence[Value]) -> None:
        """A float result that only its quantized form is read of is not written at all."""
        read = {value.buffer for call in self.calls for value in call.reads.values()} | {output.buffer for output in outputs}
        for call in self.calls:
            out = call.writes.get("out")
            if "to.codes" in call.writes and out is not None and out.buffer not in read:
                del call.writes["out"]

    def _lifetimes(self, outputs: Sequence[Value]) -> None:
        for index, call in enumerate(self.calls):
            for value in (*call.reads.values(), *call.writes.values()):
                buffer = value.buffer
                buffer.first = index if buffer.first < 0 else buffer.first
                buffer.last = index
        for output in outputs:
            output.buffer.last = len(self.calls)
        assert self._hidden is not None
        self._hidden.buffer.first = 0
        self._hidden.buffer.last = max(self._hidden.buffer.last, 0)

    def _place(self) -> Tensor:
        """First fit: a buffer takes the lowest place that no buffer alive at the same time lies in."""
        buffers = {value.buffer for call in self.calls for value in (*call.reads.values(), *call.writes.values())}
        assert self._hidden is not None
        buffers.add(self._hidden.buffer)
        placed: list[tuple[int, int, Buffer]] = []
        for buffer in sorted(buffers, key=lambda b: (b.first, -b.token_bytes)):
            size = -(-buffer.token_bytes * buffer.rows // ALIGNMENT) * ALIGNMENT
            start = 0
            for low, high, other in sorted(placed, key=lambda entry: entry[0]):
                if other.last < buffer.first or buffer.last < other.first:
                    continue
                if start + size <= low:
                    break
                start = max(start, high)
            buffer.address = start
            placed.append((start, start + size, buffer))
        total = max((high for _, high, _ in placed), default=0)
        arena = torch.zeros(total + ALIGNMENT, dtype=torch.uint8)
        base = -(-arena.data_ptr() // ALIGNMENT) * ALIGNMENT
        for _, _, buffer in placed:
            buffer.address += base
        return arena


def _point(arguments: Any, name: str, value: Value) -> None:
    """Write a value's address, and its stride where there is a field for it."""
    *path, last = name.split(".")
    for part in path:
        arguments = getattr(arguments, part)
    setattr(arguments, last, value.buffer.address + value.offset)
    if hasattr(arguments, f"{last}_stride"):
        setattr(arguments, f"{last}_stride", value.stride)


class Program:
    """See `pegboard.interfaces.kernel.Program`."""

    def __init__(self, recorder: NativeRecorder, arena: Tensor, hidden: Value, output: Value, logits: Value | None) -> None:
        """hidden: where it may be entered; output: of the forward; logits: of the head, if there is one."""
        self._keep = (recorder.keep, recorder.calls)
        self.library, self.arena = recorder.library, arena
        calls, entry = recorder.calls, recorder.entry
        head = len(calls) if recorder.head_start is None or logits is None else recorder.head_start
        self.num_calls = len(calls)
        instructions = self.library.instructions([(call.kernel, call.arguments) for call in calls])
        self._all = (instructions, len(calls))
        self._forward = (instructions, head)
        self._entered = (_from(instructions, entry), head - entry)
        self._head = (_from(instructions, head), len(calls) - head)
        self._hidden, self._output = self._tensor(hidden), self._tensor(output)
        self._logits = None if logits is None else self._tensor(logits)
        self._positions, self._token_ids = Indices(recorder.lookups), Indices(recorder.embeddings)

    def _tensor(self, value: Value) -> Tensor:
        """The value's memory as a tensor [rows, width]."""
        buffer = value.buffer
        start = buffer.address - self.arena.data_ptr()
        rows = self.arena[start : start + buffer.rows * buffer.token_bytes].view(torch.float32)
        return rows.view(buffer.rows, -1)[:, value.offset // 4 : value.offset // 4 + value.width]

    def __call__(self, start: Tensor, positions: Tensor | None = None) -> Tensor:
        count = start.shape[0]
        self._tell_positions(positions)
        if start.dim() == 1:
            self._tell_token_ids(start)
            self.library.run(*self._forward, count)
        else:
            self._hidden[:count].copy_(start)
            self.library.run(*self._entered, count)
        return self._output[:count]

    def step(self, token_ids: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert self._logits is not None, "no head was recorded"
        count = token_ids.shape[0]
        self._tell_positions(positions)
        self._tell_token_ids(token_ids)
        self.library.run(*self._all, count)
        return self._output[:count], self._logits[:count]

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._logits is not None, "no head was recorded"
        count = hidden.shape[0]
        if hidden.data_ptr() != self._output.data_ptr():
            self._output[:count].copy_(hidden)
        self.library.run(*self._head, count)
        return self._logits[:count]

    def _tell_positions(self, positions: Tensor | None) -> None:
        if positions is not None:
            self._positions.tell(positions)

    def _tell_token_ids(self, token_ids: Tensor) -> None:
        assert self._token_ids.lookups, "this program was recorded from hidden states"
        self._token_ids.tell(token_ids)


class Indices:
    """The calls that look rows up, and where their indices are: in most steps where they were."""

    def __init__(self, lookups: "Sequence[LookupFloat | LookupBlocks]") -> None:
        self.lookups = lookups
        self.address = 0

    def tell(self, indices: Tensor) -> None:
        self.indices = indices.contiguous()  # held until the next step's
        address = self.indices.data_ptr()
        if address != self.address:
            self.address = address
            for lookup in self.lookups:
                lookup.ids = address


def _from(instructions: "ctypes.Array[Instruction]", start: int) -> "ctypes.Array[Instruction]":
    """The same memory from instruction `start` on."""
    return (Instruction * (len(instructions) - start)).from_buffer(instructions, start * sizeof(Instruction))
