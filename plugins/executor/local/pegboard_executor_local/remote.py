"""The ranks of other hosts, as the engine's process sees them.

Each other host makes a connection for each of its ranks, which then is the rank's link, and one for
itself. Over the latter, it says which rank has died, and hears when to end.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from pegboard.errors import ConfigError, PegboardError
from pegboard.interfaces.executor import ExecutorSetup, Hosts
from pegboard.log import get_logger
from pegboard_executor_local.handshake import Stranger, admit, keep_alive, required_key
from pegboard_executor_local.link import Link, LinkClosed
from pegboard_executors.answers import dumped

log = get_logger(__name__)

GREET_S = 10.0
"""Seconds in which a host that connects shows that it knows the key and has the same plugins."""

PATIENCE_S = 600.0
"""Seconds to wait for all hosts."""

LOOK_S = 0.1


class RemoteRank:
    """The process of a rank on another host. Implements
    `pegboard.interfaces.executor.ChildProcess`. host: its name. connection: that of its host."""

    pid = 0  # there is no such process on this host

    def __init__(self, host: str, link: Link, connection: Link) -> None:
        self.link = link
        self._host = host
        self._connection = connection
        self._end: str | None = None
        self._reader, self._writer = os.pipe()

    @property
    def sentinel(self) -> int:
        return self._reader

    @property
    def exitcode(self) -> int | None:
        return None if self._end is None else 1

    def how_it_ended(self) -> str:
        return f"{self._end or 'still going'}, on host {self._host}"

    def has_ended(self, reason: str) -> None:
        """Note the first reason."""
        if self._end is None:
            self._end = reason
            os.close(self._writer)

    def end_now(self) -> None:
        """Do nothing: its host lets it end."""

    def kill(self) -> None:
        """Let the host kill all its ranks."""
        self._connection.shut_down()

    def end(self, patience_s: tuple[float, float, float]) -> None:
        wait([self._reader], sum(patience_s))
        self.has_ended("its host did not say that it has ended")
        os.close(self._reader)


@dataclass(slots=True)
class Host:
    """Another host. links: of its ranks, by their numbers on that host."""

    name: str
    connection: Link
    links: dict[int, Link] = field(default_factory=dict)


class RemoteHosts:
    """All hosts but this one. ranks: how many each of them has."""

    def __init__(self, hosts: Hosts, ranks: int, setup: ExecutorSetup) -> None:
        """Listen. Raises ConfigError if that is not possible."""
        self._hosts = hosts
        self._ranks = ranks
        self._key = required_key()
        self._check = dumped(setup.check_plugins)
        self._came: queue.SimpleQueue[tuple[dict[str, Any], Link] | PegboardError] = (
            queue.SimpleQueue()
        )
        self._members: dict[int, Host] = {}
        self._links: list[Link] = []
        self._threads: list[threading.Thread] = []
        try:
            self._listener = socket.create_server((hosts.address, hosts.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {hosts.address}:{hosts.port} for the other hosts: "
                f"{error.strerror}; master_addr must be an address of this host, and master_port a "
                "free port"
            ) from error
        self._listener.settimeout(LOOK_S)

    def wait_for_all(self) -> list[RemoteRank]:
        """Return the ranks of all other hosts, in order. Raises ConfigError if they do not come in
        time, and PluginBroken if one has other plugins."""
        hosts = self._hosts
        log.info(
            "waiting for %d more host%s at %s:%d",
            hosts.count - 1,
            "s" * (hosts.count > 2),
            hosts.address,
            hosts.port,
        )
        limit = time.monotonic() + PATIENCE_S
        with self._listener:
            while missing := self._missing():
                if time.monotonic() > limit:
                    raise ConfigError(
                        f"no word from the hosts with node_rank {missing} for {PATIENCE_S:g} s; "
                        "start pegboard serve --headless on each, with the same --master-addr"
                    )
                with contextlib.suppress(TimeoutError):
                    self._start_thread(self._greet, *self._accept())
                while not self._came.empty():
                    self._take(self._came.get())
        return [rank for _, host in sorted(self._members.items()) for rank in self._ranks_of(host)]

    def abandon(self) -> None:
        """Let the other hosts end with an error, because the start has failed."""
        for link in self._links:
            link.shut_down()

    def stop(self) -> None:
        """Let the other hosts end in order. Their connections end when they have."""
        self._listener.close()
        for host in self._members.values():
            with contextlib.suppress(LinkClosed):
                host.connection.send(0, b"")

    def close(self) -> None:
        """Close all connections but those of ranks."""
        self._listener.close()
        for link in self._links:
            link.shut_down()
        for thread in self._threads:
            thread.join()
        for link in self._links:
            link.close()

    def _missing(self) -> list[int]:
        """Return the numbers of the hosts of which a connection is missing."""
        members = self._members
        return [
            number
            for number in range(1, self._hosts.count)
            if number not in members or len(members[number].links) < self._ranks
        ]

    def _accept(self) -> tuple[socket.socket, Link, str]:
        end, address = self._listener.accept()
        link = Link(end)
        self._links.append(link)
        return end, link, address[0]

    def _start_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(
            target=function, args=arguments, name="pegboard-host", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _greet(self, end: socket.socket, link: Link, address: str) -> None:
        """Let a connection in if it knows the key. A host's own one comes first, and others only
        after its plugins were checked."""
        try:
            end.settimeout(GREET_S)
            hello = admit(end, self._key)
            keep_alive(end)
        except (OSError, Stranger) as error:
            log.warning("a connection from %s was refused: %s", address, error)
            link.close()
            return
        try:
            if "rank" in hello:
                self._came.put((hello, link))
            else:
                self._examine(link, hello)
                self._came.put((hello, link))
                link.send(0, b"")  # its ranks may come now
        except PegboardError as error:
            self._came.put(error)
            link.close()
        except LinkClosed:
            link.close()

    def _examine(self, link: Link, hello: dict[str, Any]) -> None:
        """Check the settings and the plugins of a host. It hears of differences."""
        expected = {"nnodes": self._hosts.count, "ranks of a host": self._ranks}
        if hello["expects"] != expected or not 0 < hello["number"] < self._hosts.count:
            refusal = ConfigError(
                f"host {hello['name']} has node_rank {hello['number']} and {hello['expects']}, but "
                f"the engine has {expected}; give every host the same sizes and its own node_rank"
            )
            link.send(1, dumped(refusal))
            raise refusal
        link.send(0, self._check)
        if not link.has_message(GREET_S):
            raise LinkClosed
        number, answer = link.receive()
        if number:
            raise pickle.loads(answer)

    def _take(self, came: tuple[dict[str, Any], Link] | PegboardError) -> None:
        if isinstance(came, PegboardError):
            raise came
        hello, link = came
        number = hello["number"]
        members = self._members
        if "rank" in hello:
            members[number].links[hello["rank"]] = link
        elif number in members:
            raise ConfigError(
                f"the hosts {members[number].name} and {hello['name']} both have node_rank "
                f"{number}; give each host its own"
            )
        else:
            members[number] = Host(hello["name"], link)

    def _ranks_of(self, host: Host) -> list[RemoteRank]:
        """Return the ranks of a host, and listen to it."""
        ranks = [
            RemoteRank(host.name, host.links[rank], host.connection) for rank in range(self._ranks)
        ]
        for rank in ranks:
            self._links.remove(rank.link)  # the executor closes it
        self._start_thread(hear, host.connection, ranks)
        return ranks


def hear(connection: Link, ranks: Sequence[RemoteRank]) -> None:
    """Note what a host says of its ranks, until its connection ends."""
    with contextlib.suppress(LinkClosed):
        while True:
            number, reason = connection.receive()
            ranks[number].has_ended(reason.decode())
    for rank in ranks:
        rank.has_ended("the connection has ended")
