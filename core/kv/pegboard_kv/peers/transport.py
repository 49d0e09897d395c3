"""How the content of blocks gets from one engine to another, whose connection is there. It imports
no torch."""

from __future__ import annotations

import socket
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import msgspec

from pegboard_kv.peers.memory import AnyMemory, Arena, Memory, address_of
from pegboard_kv.peers.wire import (
    Line,
    PeerError,
    receive,
    receive_block,
    receive_message,
    send_block,
    send_message,
)

READ_S = 60.0
"""Seconds after which an engine that does not say that it has read a block is given up."""


class Transport(ABC):
    """Sends and receives blocks. Both engines have the same one, which `name` says.

    memory: where blocks that are sent, and buffers for blocks, must be. endpoint: what the other
    engine must know of this one. Any thread may call the methods."""

    name: str
    memory: Memory
    endpoint: bytes

    @abstractmethod
    def send(self, connection: socket.socket, contents: Iterable[memoryview | None]) -> None:
        """Send blocks; None = this engine does not have it. On return, they may be overwritten.
        Raises OSError, PeerError, msgspec.DecodeError."""

    @abstractmethod
    def receive(self, line: Line, buffers: Sequence[memoryview], until: float) -> list[bool]:
        """Fill the buffers with what the other engine sends. Return for each whether it has it.
        until: `time.monotonic`. Raises OSError, PeerError, msgspec.DecodeError."""

    def close(self) -> None:
        """Release what the transport has. What is being received ends with an error. It may be
        called twice."""


class Stream(Transport):
    """Blocks go through the connection itself."""

    name = "stream"
    endpoint = b""

    def __init__(self) -> None:
        self.memory = AnyMemory()

    def send(self, connection: socket.socket, contents: Iterable[memoryview | None]) -> None:
        for content in contents:
            connection.sendall(b"\0" if content is None else b"\1")
            if content is not None:
                send_block(connection, content)

    def receive(self, line: Line, buffers: Sequence[memoryview], until: float) -> list[bool]:
        present = []
        for buffer in buffers:
            is_there = _is_next_there(line, until)
            if is_there:
                receive_block(line.socket, buffer)
            present.append(is_there)
        return present


class Ticket(msgspec.Struct, array_like=True):
    """A block in the sender's memory. crc: CRC-32 of its content."""

    address: int
    num_bytes: int
    crc: int


class Reading(Transport):
    """The sender says where blocks are, and the receiver reads them there with a library. It says
    when it has, and until then the sender keeps them. arena: the memory that the library knows."""

    def __init__(self, arena: Arena) -> None:
        self.memory = arena

    @abstractmethod
    def read(self, endpoint: bytes, parts: Sequence[tuple[int, memoryview]], until: float) -> None:
        """Read from the memory of the engine with this endpoint: address there → buffer here, all
        of them. If it fails, the buffers stay in use as long as anything could still come. until:
        `time.monotonic`. Raises PeerError."""

    def send(self, connection: socket.socket, contents: Iterable[memoryview | None]) -> None:
        kept = []
        for content in contents:
            connection.sendall(b"\0" if content is None else b"\1")
            if content is not None:
                kept.append(content)
                ticket = Ticket(address_of(content), len(content), zlib.crc32(content))
                send_message(connection, ticket)
        if kept:
            connection.settimeout(READ_S)
            receive_message(connection, None)

    def receive(self, line: Line, buffers: Sequence[memoryview], until: float) -> list[bool]:
        present = []
        tickets: list[tuple[Ticket, memoryview]] = []
        for buffer in buffers:
            is_there = _is_next_there(line, until)
            if is_there:
                tickets.append((self._ticket(line, len(buffer)), buffer))
            present.append(is_there)
        if tickets:
            self.read(line.endpoint, [(each.address, buffer) for each, buffer in tickets], until)
            if any(zlib.crc32(buffer) != each.crc for each, buffer in tickets):
                raise PeerError("a block has a wrong checksum")
            send_message(line.socket, None)
        return present

    def _ticket(self, line: Line, num_bytes: int) -> Ticket:
        ticket: Ticket = receive_message(line.socket, Ticket)
        if ticket.num_bytes != num_bytes:
            raise PeerError(f"it has a block of {ticket.num_bytes} bytes, expected {num_bytes}")
        return ticket


def _is_next_there(line: Line, until: float) -> bool:
    line.socket.settimeout(max(until - time.monotonic(), 0.001))
    return receive(line.socket, 1) == b"\1"
