"""Groups of ranks that exchange tensors through a process group of torch. There is no default
group, so several engines in a process do not know about each other."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from pegboard.errors import CannotRecord, ConfigError, EngineDeadError
from pegboard.interfaces.collective import CollectiveSetup

MakeGroup = Callable[[Store, int, int, timedelta], Any]


class TorchCollective:
    """See `pegboard.interfaces.collective.Collective`. make: (store where the ranks meet, rank,
    number of ranks, time limit) → process group."""

    def __init__(self, setup: CollectiveSetup, make: MakeGroup) -> None:
        self.setup = setup
        self.make = make
        self.size = len(setup.ranks)
        self.timeout = timedelta(seconds=setup.timeout_s)
        self.group: Any = None
        self.group = self._wait("start", self._connect)

    def _connect(self) -> Any:
        setup = self.setup
        store = open_store(setup.address, setup.ranks[setup.rank] == 0, self.timeout)
        prefix = f"{setup.group}-{'-'.join(map(str, setup.ranks))}"
        return self.make(PrefixStore(prefix, store), setup.rank, self.size, self.timeout)

    def all_reduce(self, x: Tensor) -> Tensor:
        check(x)
        x = x.contiguous()
        self._wait("all_reduce", lambda: self.group.allreduce([x]).wait())
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        check(x)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait("all_gather", lambda: self.group.allgather([parts], [x]).wait())
        return torch.cat(parts, 1)

    def close(self) -> None:
        self.group = None

    def _wait(self, call: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except RuntimeError as error:
            setup = self.setup
            others = ", ".join(str(rank) for rank in setup.ranks if rank != setup.ranks[setup.rank])
            raise EngineDeadError(
                f"{call} of the group {setup.group!r} failed: rank {others} did not come within "
                f"{setup.timeout_s:g} s, or has ended ({error})"
            ) from error


def gloo(options: None, setup: CollectiveSetup) -> TorchCollective:
    """Return a group for tensors in the host's memory, over TCP."""
    return TorchCollective(setup, dist.ProcessGroupGloo)


def nccl(options: None, setup: CollectiveSetup) -> TorchCollective:
    """Return a group for tensors on devices of NVIDIA, or of AMD through RCCL."""

    def make(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        group_options = dist.ProcessGroupNCCL.Options()
        group_options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, group_options)

    return TorchCollective(setup, make)


def check(x: Tensor) -> None:
    """Raise CannotRecord for the stand-in of a tensor."""
    if type(x) is not Tensor:
        raise CannotRecord("torch exchanges tensors outside of recordings")


def open_store(address: str, is_first: bool, timeout: timedelta) -> Store:
    """Return the store where ranks meet (see `Place.address`). is_first: it listens, if the store
    is at a port. Raises ConfigError for another form of address."""
    parts = urlsplit(address)
    if parts.scheme == "file":
        # torch deletes the file when all have left, and each group has its own keys in it
        return FileStore(str(Path(unquote(parts.path))), -1)
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        return TCPStore(parts.hostname, parts.port, None, is_first, timeout, False)
    raise ConfigError(f"ranks meet at {address!r}; expected file:///path or tcp://host:port")
