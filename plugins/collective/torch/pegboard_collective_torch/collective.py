"""One group of ranks over a process group of torch."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from pegboard.errors import CannotRecord, ConfigError, EngineDeadError
from pegboard.interfaces.collective import CollectiveSetup

POLL_S = 0.001
BUSY_S = 90.0
"""How long rank 0 waits for a port that is in use. Closed connections keep theirs for a minute."""
BUSY_POLL_S = 0.1
GRACE_S = 1.0
"""How long a rank whose call failed waits for the other ranks to say the same. The ranks that say
nothing are those that did not come."""


class TorchCollective:
    """Implements `pegboard.interfaces.collective.Collective` with gloo on a CPU, NCCL on a GPU. The
    process group is constructed directly, so nothing of `torch.distributed` is global."""

    def __init__(self, options: None, setup: CollectiveSetup) -> None:
        """Wait for all ranks. Raises EngineDeadError if one does not come in time, and ConfigError
        if the address or the device cannot be used."""
        self._setup = setup
        self._limit = timedelta(seconds=setup.timeout_s)
        self._calls = 0
        self._store: Any = None
        self._group: Any = None
        deadline = time.monotonic() + setup.timeout_s
        with self._failures("the start"):
            self._store = _store(setup, self._limit)
            self._wait_for_all(deadline)
            make_group = _gloo if torch.device(setup.device).type == "cpu" else _nccl
            self._group = make_group(self._store, setup, self._limit)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`. x [T, …] is overwritten if it is contiguous."""
        group = self._live_for(x)
        whole = x.contiguous()
        with self._failures("all_reduce"):
            group.allreduce([whole]).wait()
        return whole

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collective.all_gather`. x: [T, n]."""
        group = self._live_for(x)
        ranks = len(self._setup.ranks)
        below = x.new_empty(ranks * x.shape[0], x.shape[1])
        with self._failures("all_gather"):
            group._allgather_base(below, x.contiguous()).wait()
        return torch.cat(below.chunk(ranks), 1)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See `Collective.broadcast`. x [T, …] is overwritten if it is contiguous."""
        group = self._live_for(x)
        whole = x.contiguous()
        options = distributed.BroadcastOptions()
        options.rootRank = source
        with self._failures("broadcast"):
            group.broadcast([whole], options).wait()
        return whole

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
        self._group = None
        self._store = None

    def _live_for(self, x: Tensor) -> Any:
        """Return the process group. Raises CannotRecord for the stand-in of a tensor."""
        if type(x) is not Tensor:
            raise CannotRecord(f"torch's process groups exchange tensors, not {type(x).__name__}")
        if self._group is None:
            raise EngineDeadError(f"group {self._setup.group!r}: it is closed")
        return self._group

    def _wait_for_all(self, deadline: float) -> None:
        """Wait until all ranks have reached the store. Raises TimeoutError if one does not."""
        self._store.set(f"start/{self._setup.rank}", "")
        while absent := self._silent("start"):
            if time.monotonic() > deadline:
                raise TimeoutError(absent)
            time.sleep(POLL_S)

    def _silent(self, call: str) -> list[int]:
        """Return the ranks that have not said in the store that they reached a call."""
        ranks = enumerate(self._setup.ranks)
        return [rank for place, rank in ranks if not self._store.check([f"{call}/{place}"])]

    @contextmanager
    def _failures(self, call: str) -> Iterator[None]:
        """Make EngineDeadError of torch's errors, and find out which ranks did not come."""
        self._calls += 1
        try:
            yield
        except TimeoutError as error:
            raise self._death(call, error.args[0], "") from None
        except RuntimeError as error:
            raise self._death(call, self._absent(), f" ({error})") from error

    def _absent(self) -> list[int]:
        """Return the ranks whose call did not fail too, [] if that cannot be known."""
        if self._store is None:
            return []
        call = f"failed {self._calls}"
        deadline = time.monotonic() + GRACE_S
        try:
            self._store.set(f"{call}/{self._setup.rank}", "")
            while (absent := self._silent(call)) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        except RuntimeError:  # the rank that serves the store has died
            return []
        return absent

    def _death(self, call: str, absent: list[int], reason: str) -> EngineDeadError:
        who = f"these ranks did not come: {', '.join(map(str, absent))}" if absent else "it failed"
        return EngineDeadError(
            f"group {self._setup.group!r}: {call} waits at most {self._setup.timeout_s:g} s, and "
            f"{who}{reason}"
        )


def _store(setup: CollectiveSetup, limit: timedelta) -> Any:
    """Return the part of the address's store that is this group's own. Raises ConfigError for an
    address that is neither a file nor a port."""
    members = ",".join(map(str, setup.ranks))
    name = hashlib.sha256(f"{setup.group} {members}".encode()).hexdigest()[:16]
    address = urlsplit(setup.address)
    if address.scheme == "file" and address.path:
        path = f"{unquote(address.path)}.{name}"
        return FileStore(path, len(setup.ranks))
    if address.scheme == "tcp" and address.hostname and address.port:
        is_master = setup.ranks[setup.rank] == 0
        return PrefixStore(name, server_at(address.hostname, address.port, is_master, limit))
    raise ConfigError(
        f"ranks cannot meet at {setup.address!r}: expected file:///path or tcp://host:port"
    )


def server_at(host: str, port: int, is_master: bool, limit: timedelta) -> TCPStore:
    """Return the store at a port, which rank 0 serves. An engine that has just ended may leave the
    port in use for a while, or a connection to somewhere else may have got it."""
    deadline = time.monotonic() + min(limit.total_seconds(), BUSY_S)
    while True:
        try:
            return TCPStore(
                host,
                port,
                is_master=is_master,
                timeout=limit,
                wait_for_workers=False,
                multi_tenant=True,  # the groups of a process share rank 0's server
            )
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(BUSY_POLL_S)


def _gloo(store: Any, setup: CollectiveSetup, limit: timedelta) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [gloo.create_device(hostname=_own_address(setup.address))]
    return gloo(store, setup.rank, len(setup.ranks), options)


def _own_address(address: str) -> str:
    """Return the IP address under which the ranks that meet at `address` reach this one."""
    meeting = urlsplit(address)
    if meeting.scheme == "file":
        return "127.0.0.1"
    places = socket.getaddrinfo(meeting.hostname, meeting.port, type=socket.SOCK_DGRAM)
    family, kind, _, _, place = places[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # of a datagram socket: only the route is looked up
        return str(probe.getsockname()[0])


def _nccl(store: Any, setup: CollectiveSetup, limit: timedelta) -> Any:
    """Return the group after its first call, which makes NCCL's communicator."""
    if not distributed.is_nccl_available():
        raise ConfigError("this torch has no NCCL: install one that is built for GPUs")
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = limit
    device = torch.device(setup.device)
    with torch.cuda.device(device):
        group = nccl(store, setup.rank, len(setup.ranks), options)
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize(device)
    return group
