"""The ranks of a host without an engine. The engine's process is on the first host."""

from __future__ import annotations

import contextlib
import pickle
import socket
import time
from typing import Any

from pegboard.errors import ConfigError, EngineDeadError, PegboardError
from pegboard.interfaces.executor import ChildProcess, HostSetup, WorkerDeath
from pegboard.log import get_logger
from pegboard_executor_local.handshake import Stranger, introduce, keep_alive, required_key
from pegboard_executor_local.link import Link, LinkClosed
from pegboard_executor_local.processes import end_all
from pegboard_executor_local.watch import Watch
from pegboard_executors.answers import dumped

log = get_logger(__name__)

PATIENCE_S = 600.0
"""Seconds to wait for the engine to listen."""

RETRY_S = 0.5
ANSWER_S = 10.0
LAST_S = 5.0
"""Seconds that a host waits for the engine after one of its ranks has died."""


def run_host(setup: HostSetup) -> int:
    """Run the ranks of this host until the engine ends. Return 0 if it has stopped in order, and 1
    if it or a rank has died. Raises ConfigError or PluginBroken if the engine refuses this host."""
    key = required_key()
    hosts = setup.hosts
    first = hosts.number * setup.ranks
    children: list[ChildProcess] = []
    watch: Watch | None = None
    log.info("waiting for the engine at %s:%d", hosts.address, hosts.port)
    connection = Link(_connected(setup, key, {"expects": _expected(setup)}))
    try:
        _be_examined(connection)
        for rank in range(setup.ranks):
            with _connected(setup, key, {"rank": rank}) as end:
                number = end.fileno()
                child = setup.start_process(
                    "pegboard_executor_local.rank:main",
                    role=f"worker {first + rank}",
                    pass_fds=(number,),
                    fd=number,
                )
                children.append(child)
        log.info("ranks %d to %d run here", first, first + setup.ranks - 1)
        watch = Watch(children, lambda: None)
        watch.tell(lambda death: _report(connection, death))
        return _wait_for_the_end(connection, watch)
    finally:
        if watch is not None:
            watch.end()
        end_all(children)
        connection.close()  # after the ranks have ended, so that nothing remains when this is seen


def _expected(setup: HostSetup) -> dict[str, int]:
    return {"nnodes": setup.hosts.count, "ranks of a host": setup.ranks}


def _connected(setup: HostSetup, key: bytes, content: dict[str, Any]) -> socket.socket:
    """Return a connection to the engine. Waits until the engine listens. Raises ConfigError if that
    takes too long, or if the two do not have the same key."""
    hosts = setup.hosts
    where = f"{hosts.address}:{hosts.port}"
    limit = time.monotonic() + PATIENCE_S
    while True:
        try:
            end = socket.create_connection((hosts.address, hosts.port), ANSWER_S)
            break
        except OSError as error:
            if time.monotonic() > limit:
                raise ConfigError(
                    f"no engine listens at {where} for {PATIENCE_S:g} s: {error}; start pegboard "
                    "serve with the same --nnodes and --master-addr on the first host"
                ) from error
        time.sleep(RETRY_S)
    try:
        introduce(end, key, {"number": hosts.number, "name": socket.gethostname(), **content})
        keep_alive(end)
    except (OSError, Stranger) as error:
        end.close()
        raise ConfigError(
            f"the process at {where} is not trusted: {error}; set PEGBOARD_CLUSTER_KEY to the same "
            "text on every host"
        ) from error
    return end


def _be_examined(connection: Link) -> None:
    """Let the engine check the settings and the plugins of this host."""
    try:
        number, message = connection.receive()
        if number:
            raise pickle.loads(message)
        try:
            pickle.loads(message)()
        except PegboardError as error:
            connection.send(1, dumped(error))
            raise
        connection.send(0, b"")
        connection.receive()
    except LinkClosed:
        raise EngineDeadError("the engine's process ended while this host joined it") from None


def _report(connection: Link, death: WorkerDeath) -> None:
    """Tell the engine which rank has died."""
    with contextlib.suppress(LinkClosed):
        connection.send(death.rank, death.reason.encode())


def _wait_for_the_end(connection: Link, watch: Watch) -> int:
    """Wait until the engine stops, or until it or a rank has died."""
    while watch.death is None:
        if connection.has_message(RETRY_S):
            break
    # the engine closes the connection as soon as it knows which rank has died
    if connection.has_message(LAST_S):
        with contextlib.suppress(LinkClosed):
            connection.receive()
            return 0
    if watch.death is not None:
        log.error("rank %d of this host died: %s", watch.death.rank, watch.death.reason)
    else:
        log.error("the engine's process has ended; its log says why")
    return 1
