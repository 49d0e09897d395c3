"""Serves the blocks of a store to other engines, in threads, whatever the engine does meanwhile. It
imports no torch."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec

from pegboard.errors import ConfigError
from pegboard.log import get_logger
from pegboard_kv.peers.book import AddressBook
from pegboard_kv.peers.store import HostStore
from pegboard_kv.peers.transport import Transport
from pegboard_kv.peers.wire import (
    Engine,
    Line,
    PeerError,
    Request,
    receive_message,
    send_message,
)

log = get_logger(__name__)

BACKLOG = 64
MAX_CONNECTIONS = 256
"""More are closed at once."""
HELLO_S = 10.0
"""Seconds that a new connection has for its hello."""
MAX_WAIT_MS = 600_000
MAX_BLOCKS = 1024
"""Blocks in a request."""


class BlockServer:
    """Serves `store` on `address` until it is closed. sizes: bytes of a block of each KV group.
    takes: whether other engines may send blocks. Raises ConfigError if the address cannot be
    used."""

    def __init__(
        self,
        address: tuple[str, int],
        engine: Engine,
        transport: Transport,
        store: HostStore,
        book: AddressBook,
        sizes: Sequence[int],
        *,
        takes: bool,
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._store = store
        self._book = book
        self._sizes = sizes
        self._takes = takes
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread | None] = {}
        self._is_closed = False
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot serve KV blocks on {address[0]}:{address[1]}: "
                f"{error.strerror or error}; give each engine its own host and port"
            ) from error
        self._thread = threading.Thread(target=self._accept, name="kv-serve", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:
                return
            with self._lock:
                is_welcome = not self._is_closed and len(self._connections) < MAX_CONNECTIONS
                if is_welcome:
                    self._connections[connection] = None
            if not is_welcome or not self._book.may_connect(host):
                log.warning("a connection from %s is closed: it is not one of the peers", host)
                self._drop(connection)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection, host), name="kv-serve", daemon=True
            )
            with self._lock:
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket, host: str) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(HELLO_S)
            line = self._engine.meet(connection, calls=False)
            while True:
                connection.settimeout(None)
                self._answer(line, receive_message(connection, Request))
        except (PeerError, msgspec.DecodeError) as error:
            log.warning("no KV blocks for the engine at %s: %s", host, error)
        except OSError as error:
            log.debug("the connection from %s has ended: %s", host, error)
        finally:
            self._drop(connection)

    def _answer(self, line: Line, request: Request) -> None:
        if not 0 <= request.group < len(self._sizes):
            raise PeerError(f"it asked for KV group {request.group} of {len(self._sizes)}")
        if len(request.hashes) > MAX_BLOCKS:
            raise PeerError(f"it named {len(request.hashes)} blocks, expected at most {MAX_BLOCKS}")
        if request.kind == "get":
            self._transport.send(line.socket, self._contents(request))
        elif request.kind == "put" and self._takes:
            self._take(line, request)
        else:
            raise PeerError(f"it asked for {request.kind[:40]!r}, which this engine does not do")

    def _contents(self, request: Request) -> Iterator[memoryview | None]:
        until = time.monotonic() + min(request.wait_ms, MAX_WAIT_MS) / 1000
        for block_hash in request.hashes:
            content = self._store.wait_for((request.group, block_hash), until)
            if content is None:
                until = 0.0  # the asking engine computes from here on; the rest may still be there
            yield content

    def _take(self, line: Line, request: Request) -> None:
        until = time.monotonic() + MAX_WAIT_MS / 1000
        buffers = []
        for _ in request.hashes:
            buffer = self._store.room(self._sizes[request.group])
            if buffer is None:
                raise PeerError("all memory for blocks is in use; raise size_gb")
            buffers.append(buffer)
        present = self._transport.receive(line, buffers, until)
        for block_hash, buffer, is_there in zip(request.hashes, buffers, present, strict=True):
            if is_there:
                self._store.put((request.group, block_hash), buffer)
        send_message(line.socket, None)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(connection, None)
        connection.close()

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._is_closed = True
        # a thread that waits in accept or recv is woken by shutdown, and not by close
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            connections = dict(self._connections)
        for connection, thread in connections.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            if thread is not None:
                thread.join()
