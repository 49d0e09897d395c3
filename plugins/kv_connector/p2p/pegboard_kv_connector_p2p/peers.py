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

from pegboard_kv_connector_p2p.store import Name
from pegboard_kv_connector_p2p.wire import (
    Engine,
    PeerError,
    Request,
    receive,
    receive_block,
    receive_message,
    send_block,
    send_message,
)

Address = tuple[str, int]

CONNECT_S = 5.0
MAX_IDLE = 4
"""Connections to one engine that are kept for the next transfer."""


class Peers:
    """All other engines. Any thread may call it. timeout_s: of a transfer."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: dict[Address, list[socket.socket]] = {}
        self._in_use: set[socket.socket] = set()
        self._is_closed = False

    def get(
        self, address: Address, group: int, hashes: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[bool]:
        """Fill each buffer with a block. Return for each whether the other engine has it. Raises
        PeerError, OSError."""
        until = time.monotonic() + self._timeout_s
        with self._connected(address) as connection:
            wait_ms = int(self._timeout_s / 2 * 1000)
            send_message(connection, Request("get", group, list(hashes), wait_ms))
            present = []
            for buffer in buffers:
                connection.settimeout(max(until - time.monotonic(), 0.001))
                is_there = receive(connection, 1) == b"\1"
                if is_there:
                    receive_block(connection, buffer)
                present.append(is_there)
            return present

    def put(self, address: Address, blocks: Sequence[tuple[Name, memoryview]]) -> None:
        """Send blocks of one KV group. Raises PeerError, OSError."""
        (group,) = {name[0] for name, _ in blocks}
        with self._connected(address) as connection:
            connection.settimeout(self._timeout_s)
            send_message(connection, Request("put", group, [name[1] for name, _ in blocks]))
            for _, content in blocks:
                send_block(connection, content)
            receive_message(connection, None)

    @contextmanager
    def _connected(self, address: Address) -> Iterator[socket.socket]:
        """Lend a connection. After an error it is closed."""
        connection = self._take(address) or self._open(address)
        try:
            yield connection
        except msgspec.DecodeError as error:
            self._end(connection)
            raise PeerError(f"it answered with something else: {error}") from error
        except BaseException:
            self._end(connection)
            raise
        with self._lock:
            self._in_use.discard(connection)
            idle = self._idle.setdefault(address, [])
            is_kept = not self._is_closed and len(idle) < MAX_IDLE
            if is_kept:
                idle.append(connection)
        if not is_kept:
            connection.close()

    def _take(self, address: Address) -> socket.socket | None:
        """Return an idle connection that the other engine has not closed."""
        while True:
            with self._lock:
                idle = self._idle.get(address)
                if not idle:
                    return None
                connection = idle.pop()
                self._in_use.add(connection)
            connection.settimeout(0)
            try:
                connection.recv(1)
            except BlockingIOError:
                return connection
            except OSError:
                pass
            self._end(connection)

    def _open(self, address: Address) -> socket.socket:
        connection = socket.create_connection(address, CONNECT_S)
        with self._lock:
            self._in_use.add(connection)
            is_closed = self._is_closed
        try:
            if is_closed:
                raise ConnectionError("this engine stops")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._engine.meet(connection, calls=True)
        except msgspec.DecodeError as error:
            self._end(connection)
            raise PeerError(f"it is not an engine with this connector: {error}") from error
        except BaseException:
            self._end(connection)
            raise
        return connection

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._in_use.discard(connection)
        connection.close()

    def close(self) -> None:
        """End all connections, also those in use."""
        with self._lock:
            self._is_closed = True
            every = [*self._in_use, *(each for idle in self._idle.values() for each in idle)]
            self._idle.clear()
        for connection in every:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for connection in every:
            connection.close()
