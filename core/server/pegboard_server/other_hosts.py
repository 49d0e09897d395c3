"""Engines on other hosts, as the server's process sees them (`--data-parallel-address`).

Each host runs `pegboard serve --headless`. It connects to this process, and passes on the messages
to and from its engines. The connection is encrypted with keys that both ends derive from the secret
PEGBOARD_CLUSTER_KEY (CURVE of ZeroMQ). Who does not know it cannot connect, so pickles that arrive
are safe. A frame has a kind, the number of an engine, and a content:

    from a host   HELLO (which engines it runs), AGREED, REFUSED, MESSAGE, HEART, ENDED
    to a host     CHECK (a pickled function), REFUSED, MESSAGE, KILL, PROBE (no answer), STOP
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import pickle
import shutil
import threading
import time
from collections.abc import Iterable
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from zmq.utils import z85

from pegboard.config.data_parallel import engine_numbers, engines_here
from pegboard.engine.boundary.client import STOP_PATIENCE_S, EngineEnd, new_folder
from pegboard.engine.boundary.messages import (
    Dead,
    Failure,
    Start,
    ToEngine,
    decode_from_engine,
    encode,
)
from pegboard.errors import ConfigError
from pegboard.log import get_logger
from pegboard.plugins.hosts import check_same_plugins, plugin_versions
from pegboard.plugins.registry import Registry

if TYPE_CHECKING:
    from pegboard.config.schema import EngineConfig
    from pegboard.plan.engine_plan import EnginePlan

log = get_logger(__name__)

HELLO = b"hello"
CHECK = b"check"
AGREED = b"agreed"
REFUSED = b"refused"
MESSAGE = b"message"
HEART = b"heart"
KILL = b"kill"
PROBE = b"probe"
STOP = b"stop"
ENDED = b"ended"
IN_ORDER = b"in order"
"""The content of STOP: the host exits with 0."""

PATIENCE_S = 600.0
"""Seconds to wait for all hosts."""
PROBE_S = 0.5
"""Seconds between two looks whether all hosts are still connected."""
ALIVE_MS = (1000, 3000)
"""ZeroMQ asks so often whether the other end is there, and waits so long for an answer. Its own
thread answers, also while Python is busy."""


class Offer(msgspec.Struct):
    """What a host says in HELLO. name: of the host. first, count: its engines. total: the engines
    that it believes there are."""

    name: str
    first: int
    count: int
    total: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


def secure(socket: zmq.Socket[bytes], key: str, *, listens: bool) -> None:
    """Let a socket connect only to those that know the secret, and notice if they vanish. Raises
    ConfigError if ZeroMQ cannot do so."""
    if not zmq.has("curve"):
        raise ConfigError(
            "engines on several hosts need a ZeroMQ that can encrypt: install a wheel of pyzmq"
        )
    secret = z85.encode(blake2b(key.encode(), digest_size=32, person=b"pegboard").digest())
    public = zmq.curve_public(secret)
    socket.curve_secretkey = secret
    socket.curve_publickey = public
    if listens:
        socket.curve_server = True
    else:
        socket.curve_serverkey = public
    socket.set_hwm(0)
    socket.linger = 1000
    socket.heartbeat_ivl, socket.heartbeat_timeout = ALIVE_MS


class RemoteEngine(EngineEnd):
    """An engine on another host. `Engines` uses it like an `EngineProcess`. folder: on this host,
    has its heart."""

    def __init__(self, number: int, hosts: "EngineHosts") -> None:
        self.number = number
        self.folder = hosts.folder / str(number)
        self.folder.mkdir()
        self._hosts = hosts
        self._has_ended = threading.Event()
        self.kill = partial(hosts.send, KILL, number)

    def start(self, plan: "EnginePlan", *, wants_samples: bool = False) -> None:
        """Send the plan, as soon as the host has come."""
        self._hosts.expect(plan)
        self.send(Start(pickle.dumps(plan), wants_samples))

    def send(self, message: ToEngine) -> None:
        self._hosts.send(MESSAGE, self.number, encode(message))

    def died(self, reason: str) -> None:
        super().died(reason)
        self._has_ended.set()

    def stop(self) -> None:
        """Let its host end, which runs no other engine. Blocks until it has; any thread but that of
        the event loop may call it. Does nothing after `EngineHosts.stop`, which ends all hosts."""
        if self._hosts.release(self.number):
            self._has_ended.wait(sum(STOP_PATIENCE_S))
            shutil.rmtree(self.folder, ignore_errors=True)


class EngineHosts:
    """Listens for the hosts of the engines that do not run here. Used on one event loop from
    `attach` to `detach`. Raises ConfigError if it cannot listen. address: of this host. key: the
    secret of the cluster. meeting: the address where engines that share out experts meet."""

    total: int | None
    """The number of engines that hosts must expect; None = any."""

    def __init__(self, config: "EngineConfig", address: str, key: str) -> None:
        port = config.data_parallel_rpc_port
        numbers = engine_numbers(config)[len(engines_here(config)) :]
        self._where = f"{address}:{port}"
        self.meeting = f"tcp://{address}:{port + 1}"
        self.total = config.data_parallel_size
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._offers: dict[bytes, Offer] = {}
        self._members: dict[bytes, Offer] = {}
        self._ended: set[bytes] = set()
        self._waiting: dict[int, list[tuple[bytes, bytes]]] = {}
        self._check = b""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._probing: asyncio.TimerHandle | None = None
        try:
            secure(self._socket, key, listens=True)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # notices that a host is gone
            self._socket.bind(f"tcp://{self._where}")
        except (ConfigError, zmq.ZMQError) as error:
            self._socket.close()
            self._context.term()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"cannot listen at {self._where} for the hosts of other engines: {error.strerror}; "
                "data_parallel_address must be an address of this host, and data_parallel_rpc_port "
                "a free port"
            ) from error
        self.folder, self._lock = new_folder()
        self.engines: dict[int, Any] = {}
        atexit.register(self.stop)
        for number in numbers:
            self.add(number)

    def add(self, number: int) -> RemoteEngine:
        """Wait for the host of one more engine."""
        self._waiting[number] = []
        self._limit = time.monotonic() + PATIENCE_S
        self.engines[number] = engine = RemoteEngine(number, self)
        return engine

    def release(self, number: int) -> bool:
        """Let the host of an engine end in order. Return whether it is going to. Any thread may
        call it."""
        if self._loop is None:
            return False
        self._loop.call_soon_threadsafe(self.send, STOP, number, IN_ORDER)
        return True

    def expect(self, plan: "EnginePlan") -> None:
        """Expect the plugins of a plan on every host."""
        if not self._check:  # all engines have the same
            versions = plugin_versions(Registry.from_lock(plan.lock))
            self._check = pickle.dumps(partial(check_same_plugins, versions))

    def attach(self) -> None:
        """Take messages on the running event loop. A second call does nothing."""
        if self._loop is None:
            log.info("waiting for the hosts of %s at %s", named(self._waiting), self._where)
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.FD, self._receive)
            self._loop.call_soon(self._receive)
            self._probe(self._loop)

    def detach(self) -> None:
        """Take no more messages. A second call does nothing."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
            assert self._probing is not None
            self._probing.cancel()
            self._loop = None

    def send(self, kind: bytes, number: int, content: bytes = b"") -> None:
        """Send a frame to the host of an engine. If it has not come yet, it gets the frame then. If
        it is gone, the frame is dropped."""
        if number in self._waiting:
            self._waiting[number].append((kind, content))
            return
        for name, offer in self._members.items():
            if number in offer.numbers:
                self._send(name, kind, number, content)
                return

    def stop(self, *, in_order: bool = False) -> None:
        """Let all hosts end, and wait for them. in_order: no engine has died. A second call does
        nothing."""
        if self._socket.closed:
            return
        self.detach()
        atexit.unregister(self.stop)
        for name in self._members:
            self._send(name, STOP, content=IN_ORDER if in_order else b"")
        limit = time.monotonic() + sum(STOP_PATIENCE_S)
        while self._members and time.monotonic() < limit:
            if self._socket.poll(100):
                self._receive()
            self._look()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def _send(self, name: bytes, kind: bytes, number: int = 0, content: bytes = b"") -> None:
        if self._socket.closed or name in self._ended:
            return
        try:
            self._socket.send_multipart([name, kind, b"%d" % number, content])
        except zmq.ZMQError:
            self._lost(name, "is not connected any more")
        # the socket's file descriptor is edge-triggered: sending may have used up an edge
        if self._loop is not None:
            self._loop.call_soon(self._receive)

    def _probe(self, loop: asyncio.AbstractEventLoop) -> None:
        self._probing = loop.call_later(PROBE_S, self._probe, loop)
        self._look()
        if self._waiting and time.monotonic() > self._limit:
            self.give_up(
                min(self._waiting),
                f"no host has come for {named(self._waiting)} in {PATIENCE_S:g} s; start pegboard "
                "serve --headless with the same data_parallel_address there",
            )

    def give_up(self, number: int, reason: str) -> None:
        """Do not wait for the host of an engine any longer."""
        if self._waiting.pop(number, None) is not None:
            failure = Failure.of(ConfigError(reason))
            self.engines[number].take(Dead(failure, is_start=True))

    def _look(self) -> None:
        """Notice hosts that are not connected any more."""
        for name in [*self._members]:
            self._send(name, PROBE)

    def _lost(self, name: bytes, how: str) -> None:
        self._offers.pop(name, None)
        self._ended.add(name)
        if (offer := self._members.pop(name, None)) is not None:
            for number in offer.numbers:
                self.engines[number].died(f"its host {offer.name} {how}")

    def _receive(self) -> None:
        while not self._socket.closed:
            try:
                name, kind, number, content = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(name, kind, int(number), content)

    def _take(self, name: bytes, kind: bytes, number: int, content: bytes) -> None:
        if kind == HELLO:
            self._greet(name, msgspec.json.decode(content, type=Offer))
        elif name in self._offers and kind == AGREED:
            self._join(name, self._offers.pop(name))
        elif name in self._offers and kind == REFUSED:
            log.warning("host %s was refused: %s", self._offers.pop(name).name, content.decode())
        elif name not in self._members:
            self._send(name, STOP)  # it was connected to a server that is gone
        elif kind == ENDED:
            self._lost(name, "was told to end")
        elif kind == MESSAGE:
            self.engines[number].take(decode_from_engine(content))
        elif kind == HEART:
            with contextlib.suppress(OSError):  # the next one may fit on the disk
                (self.engines[number].folder / "heart").write_bytes(content)

    def _greet(self, name: bytes, offer: Offer) -> None:
        """Let a host check its plugins if its engines are wanted."""
        reason = ""
        if self.total not in (None, offer.total):
            reason = f"data_parallel_size is {offer.total} there, but {self.total} at the server"
        elif unwanted := set(offer.numbers) - self._waiting.keys():
            reason = (
                f"the server waits for {named(self._waiting)}, but this host has "
                f"{named(unwanted)}; change data_parallel_start_rank or data_parallel_size_local"
            )
        if reason:
            log.warning("host %s was refused: %s", offer.name, reason)
            self._send(name, REFUSED, content=reason.encode())
        else:
            self._offers[name] = offer
            self._send(name, CHECK, content=self._check)

    def _join(self, name: bytes, offer: Offer) -> None:
        if set(offer.numbers) - self._waiting.keys():
            self._greet(name, offer)  # another host was faster
            return
        log.info("host %s runs %s", offer.name, named(offer.numbers))
        self._members[name] = offer
        for number in offer.numbers:
            for kind, content in self._waiting.pop(number):
                self._send(name, kind, number, content)


def named(numbers: Iterable[int]) -> str:
    """Return "engine 1", or "engines 1, 2"."""
    names = [str(number) for number in sorted(numbers)]
    return f"engine{'s' * (len(names) > 1)} {', '.join(names)}"
