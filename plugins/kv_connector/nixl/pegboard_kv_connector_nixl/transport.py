"""Reads blocks with NIXL. It imports no torch, and the library when it is built."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from pegboard.errors import ConfigError
from pegboard_kv.peers.memory import Arena, address_of
from pegboard_kv.peers.transport import Reading
from pegboard_kv.peers.wire import PeerError

POLL_S = 0.0002
"""How long a reading thread sleeps before it asks again."""
DRAM = "DRAM"
"""NIXL's name for host memory."""


class NixlTransport(Reading):
    """An agent of NIXL whose memory, of `num_bytes`, other engines read. backends: names of
    NIXL's backends. Raises ConfigError if the library or a backend cannot be used."""

    name = "nixl"

    def __init__(self, num_bytes: int, backends: Sequence[str]) -> None:
        api = _library()
        arena = Arena(num_bytes)
        super().__init__(arena)
        self._lock = threading.Condition()  # an agent may be used by one thread at a time
        self._num_reads = 0
        self._is_closed = False
        self._agents: dict[bytes, str] = {}  # endpoint → what the agent there is called
        self._late: list[tuple[Any, Sequence[object]]] = []  # reads that may go on, and buffers
        try:
            config = api.nixl_agent_config(backends=list(backends))
            self._agent = api.nixl_agent(f"pegboard-{uuid.uuid4().hex}", config)
            missing = [each for each in backends if each not in self._agent.backends]
            if missing:
                known = ", ".join(self._agent.get_plugin_list())
                raise ConfigError(f"nixl has no backend {', '.join(missing)}; it has {known}")
            part = (arena.address, arena.num_bytes, 0, "")
            self._registered = self._agent.register_memory([part], DRAM)
            self.endpoint = self._agent.get_agent_metadata()
        except ConfigError:
            raise
        except Exception as error:  # the library's errors have no common class
            raise ConfigError(
                f"nixl cannot use {num_bytes:,} bytes of memory with {', '.join(backends)} "
                f"({_text(error)}); choose other backends, give the connector less memory "
                "(size_gb), or raise the limit of locked memory (ulimit -l)"
            ) from error

    def read(self, endpoint: bytes, parts: Sequence[tuple[int, memoryview]], until: float) -> None:
        handle = None
        state = "ERR"
        try:
            with self._lock:
                self._num_reads += 1
                handle = self._begin(endpoint, parts)
                state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < until and not self._is_closed:
                time.sleep(POLL_S)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
        except PeerError:
            raise
        except Exception as error:  # the library's errors have no common class
            raise PeerError(f"nixl cannot read its memory: {_text(error)}") from error
        finally:
            with self._lock:
                if handle is not None:
                    self._late.append((handle, parts))
                    self._release_late()
                if state != "DONE":
                    self._forget(endpoint)
                self._num_reads -= 1
                self._lock.notify_all()
        if state != "DONE":
            how = "has not ended in time" if state == "PROC" else "has failed"
            raise PeerError(f"reading its memory with nixl {how}")

    def _begin(self, endpoint: bytes, parts: Sequence[tuple[int, memoryview]]) -> Any:
        """Return the handle of a read that `transfer` starts."""
        if self._is_closed:
            raise PeerError("this engine stops")
        self._release_late()
        here = [(address_of(buffer), len(buffer), 0) for _, buffer in parts]
        there = [(address, len(buffer), 0) for address, buffer in parts]
        return self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(here, DRAM),
            self._agent.get_xfer_descs(there, DRAM),
            self._agent_of(endpoint),
        )

    def _agent_of(self, endpoint: bytes) -> str:
        """Return the name of the agent with this endpoint, which is introduced if it is new."""
        name = self._agents.get(endpoint)
        if name is None:
            name = self._agents[endpoint] = self._agent.add_remote_agent(endpoint)
        return name

    def _forget(self, endpoint: bytes) -> None:
        """An agent that could not be read is introduced again the next time."""
        name = self._agents.pop(endpoint, None)
        if name is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)

    def _release_late(self) -> None:
        """Give up the handles of reads that have ended. The buffers of others stay in use."""
        self._late = [(handle, parts) for handle, parts in self._late if self._goes_on(handle)]

    def _goes_on(self, handle: Any) -> bool:
        """Return whether a read goes on. If it does not, its handle is given up."""
        with contextlib.suppress(Exception):  # it has ended with an error
            if self._agent.check_xfer_state(handle) == "PROC":
                return True
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)
        return False

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._lock.wait_for(lambda: not self._num_reads)
            for endpoint in list(self._agents):
                self._forget(endpoint)
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(self._registered)
            del self._agent


def _library() -> Any:
    try:
        return import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            f"the KV connector nixl needs the library nixl: pip install nixl ({error})"
        ) from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
