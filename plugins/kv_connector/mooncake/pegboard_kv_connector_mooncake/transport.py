"""Reads blocks with Mooncake's transfer engine. It imports no torch, and the library when it is
built."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from pegboard.errors import ConfigError
from pegboard_kv.peers.memory import Arena, address_of
from pegboard_kv.peers.transport import Reading
from pegboard_kv.peers.wire import PeerError
from pegboard_kv_connector_mooncake.options import MooncakeOptions
from pegboard_kv_connector_mooncake.probe import INSTALL

METADATA = "P2PHANDSHAKE"
"""Mooncake's name for engines that ask each other, and no server, where their memory is."""
FAILED_S = 60.0
"""How long the buffers of a read that has failed stay in use: something of it could still come."""


class MooncakeTransport(Reading):
    """A transfer engine of Mooncake, whose memory other engines read. Raises ConfigError if the
    library cannot be used."""

    name = "mooncake"

    def __init__(self, options: MooncakeOptions) -> None:
        library = _library()
        arena = Arena(options.num_bytes)
        super().__init__(arena)
        self._address = arena.address
        self._engine = library.TransferEngine()
        protocol = options.mooncake_protocol
        if self._engine.initialize(options.host, METADATA, protocol, options.device_name):
            raise ConfigError(
                f"mooncake cannot use the host {options.host!r}, the protocol {protocol!r} and the "
                f"device {options.device_name!r}; it says more in its log"
            )
        status = self._engine.register_memory(arena.address, arena.num_bytes)
        if status:
            raise ConfigError(
                f"mooncake cannot use {arena.num_bytes:,} bytes of memory (error {status}); give "
                "the connector less (size_gb), or raise the limit of locked memory (ulimit -l)"
            )
        self.endpoint = f"{options.host}:{self._engine.get_rpc_port()}".encode()
        self._changed = threading.Condition()
        self._num_reads = 0
        self._is_closed = False
        self._failed: deque[tuple[float, Sequence[object]]] = deque()  # until when, buffers

    def read(self, endpoint: bytes, parts: Sequence[tuple[int, memoryview]], until: float) -> None:
        """The library has a time limit of its own, and `until` none."""
        with self._changed:
            self._forget_failed()
            if self._is_closed:
                raise PeerError("this engine stops")
            self._num_reads += 1
        status = -1
        try:
            status = self._engine.batch_transfer_sync_read(
                endpoint.decode("ascii", "replace"),
                [address_of(buffer) for _, buffer in parts],
                [address for address, _ in parts],
                [len(buffer) for _, buffer in parts],
            )
        finally:
            with self._changed:
                if status:
                    self._failed.append((time.monotonic() + FAILED_S, parts))
                self._num_reads -= 1
                self._changed.notify_all()
        if status:
            raise PeerError(f"mooncake cannot read its memory (error {status})")

    def _forget_failed(self) -> None:
        while self._failed and self._failed[0][0] < time.monotonic():
            self._failed.popleft()

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.wait_for(lambda: not self._num_reads)
        self._engine.unregister_memory(self._address)
        del self._engine


def _library() -> Any:
    try:
        return import_module("mooncake.engine")
    except ImportError as error:
        raise ConfigError(
            f"the KV connector mooncake needs the library mooncake: {INSTALL} ({error})"
        ) from error
