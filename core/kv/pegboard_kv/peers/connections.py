"""Connections to other engines, from which blocks are fetched and to which they are sent. It
imports no torch."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from pegboard_kv.peers.store import Name
from pegboard_kv.peers.transport import Transport
from pegboard_kv.peers.wire import (
    Engine,
    Line,
    PeerError,
    Request,
    receive_message,
    send_message,
)

Address = tuple[str, int]

CONNECT_S = 5.0
MAX_IDLE = 4
"""Connections to one engine that are kept for the next transfer."""


class Peers:
    """All other engines. Any thread may call it. timeout_s: of a transfer."""

    def __init__(self, engine: Engine, transport: Transport, timeout_s: float) -> None:
        self._engine = engine
        self._transport = transport
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Line]] = {}
        self._in_use: set[socket.socket] = set()
        self._is_closed = False

    def get(
        self, address: Address, group: int, hashes: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[bool]:
        """Fill each buffer with a block. Return for each whether the other engine has it. Raises
        PeerError, OSError."""
        until = time.monotonic() + self._timeout_s
        with self._connected(address) as line:
            wait_ms = int(self._timeout_s / 2 * 1000)
            send_message(line.socket, Request("get", group, list(hashes), wait_ms))
            return self._transport.receive(line, buffers, until)

    def put(self, address: Address, blocks: Sequence[tuple[Name, memoryview]]) -> None:
        """Send blocks of one KV group. Raises PeerError, OSError."""
        (group,) = {name[0] for name, _ in blocks}
        with self._connected(address) as line:
            line.socket.settimeout(self._timeout_s)
            send_message(line.socket, Request("put", group, [name[1] for name, _ in blocks]))
            self._transport.send(line.socket, (content for _, content in blocks))
            receive_message(line.socket, None)

    @contextmanager
    def _connected(self, address: Address) -> Iterator[Line]:
        """Lend a connection. After an error it is closed."""
        line = self._take(address) or self._open(address)
        try:
            yield line
        except msgspec.DecodeError as error:
            self._end(line.socket)
            raise PeerError(f"it answered with something else: {error}") from error
        except BaseException:
            self._end(line.socket)
            raise
        with self._lock:
            self._in_use.discard(line.socket)
            idle = self._idle.setdefault(address, [])
            is_kept = not self._is_closed and len(idle) < MAX_IDLE
            if is_kept:
                idle.append(line)
        if not is_kept:
            line.socket.close()

    def _take(self, address: Address) -> Line | None:
        """Return an idle connection that the other engine has not closed."""
        while True:
            with self._lock:
                idle = self._idle.get(address)
                if not idle:
                    return None
                line = idle.pop()
                self._in_use.add(line.socket)
            line.socket.settimeout(0)
            try:
                line.socket.recv(1)
            except BlockingIOError:
                line.socket.settimeout(self._timeout_s)
                return line
            except OSError:
                pass
            self._end(line.socket)

    def _open(self, address: Address) -> Line:
        connection = socket.create_connection(address, CONNECT_S)
        with self._lock:
            self._in_use.add(connection)
            is_closed = self._is_closed
        try:
            if is_closed:
                raise ConnectionError("this engine stops")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._engine.meet(connection, calls=True)
        except msgspec.DecodeError as error:
            self._end(connection)
            raise PeerError(f"it is not an engine with this connector: {error}") from error
        except BaseException:
            self._end(connection)
            raise

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._in_use.discard(connection)
        connection.close()

    def close(self) -> None:
        """End all connections, also those in use."""
        with self._lock:
            self._is_closed = True
            every = [*self._in_use, *(each.socket for idle in self._idle.values() for each in idle)]
            self._idle.clear()
        for connection in every:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for connection in every:
            connection.close()
