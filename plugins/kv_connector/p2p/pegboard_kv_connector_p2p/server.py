"""Serves the blocks of a store to other engines, in threads, whatever the engine does meanwhile. It
imports no torch."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

import msgspec

from pegboard.errors import ConfigError
from pegboard.log import get_logger
from pegboard_kv_connector_p2p.book import AddressBook
from pegboard_kv_connector_p2p.store import BlockStore
from pegboard_kv_connector_p2p.wire import (
    Engine,
    PeerError,
    Request,
    receive_block,
    receive_message,
    send_block,
    send_message,
)

log = get_logger(__name__)

BACKLOG = 64
MAX_CONNECTIONS = 256
"""More are closed at once."""
HELLO_S = 10.0
"""Seconds that a new connection has for its hello."""
MAX_WAIT_MS = 600_000


class BlockServer:
    """Serves `store` on `address` until it is closed. sizes: bytes of a block of each KV group.
    takes: whether other engines may send blocks. Raises ConfigError if the address cannot be
    used."""

    def __init__(
        self,
        address: tuple[str, int],
        engine: Engine,
        store: BlockStore,
        book: AddressBook,
        sizes: Sequence[int],
        *,
        takes: bool,
    ) -> None:
        self._engine = engine
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
                f"p2p cannot serve KV blocks on {address[0]}:{address[1]}: "
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
            self._engine.meet(connection, calls=False)
            connection.settimeout(None)
            while True:
                self._answer(connection, receive_message(connection, Request))
        except (PeerError, msgspec.DecodeError) as error:
            log.warning("no KV blocks for the engine at %s: %s", host, error)
        except OSError as error:
            log.debug("the connection from %s has ended: %s", host, error)
        finally:
            self._drop(connection)

    def _answer(self, connection: socket.socket, request: Request) -> None:
        if not 0 <= request.group < len(self._sizes):
            raise PeerError(f"it asked for KV group {request.group} of {len(self._sizes)}")
        if request.kind == "get":
            self._give(connection, request)
        elif request.kind == "put" and self._takes:
            self._take(connection, request)
        else:
            raise PeerError(f"it asked for {request.kind[:40]!r}, which this engine does not do")

    def _give(self, connection: socket.socket, request: Request) -> None:
        until = time.monotonic() + min(request.wait_ms, MAX_WAIT_MS) / 1000
        for block_hash in request.hashes:
            content = self._store.wait_for((request.group, block_hash), until)
            if content is None:
                until = 0.0  # the asking engine computes from here on; the rest may still be there
                connection.sendall(b"\0")
            else:
                connection.sendall(b"\1")
                send_block(connection, content)

    def _take(self, connection: socket.socket, request: Request) -> None:
        for block_hash in request.hashes:
            content = memoryview(bytearray(self._sizes[request.group]))
            receive_block(connection, content)
            self._store.put((request.group, block_hash), content)
        send_message(connection, None)

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
