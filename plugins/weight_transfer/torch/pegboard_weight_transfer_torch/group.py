"""The process group of a trainer and the ranks of engines. It is independent of torch's default
group, which the trainer may use for itself."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

NAME = "pegboard_weight_transfer"
POLL_S = 0.002


class Group:
    """host, port: where rank 0, the trainer, waits for the others. size: the number of ranks.
    device: of the tensors; gloo moves those on a CPU, and NCCL all others. timeout_s: how long a
    rank waits for the others. Raises RuntimeError if they do not come."""

    def __init__(
        self, host: str, port: int, rank: int, size: int, device: str, timeout_s: float
    ) -> None:
        limit = timedelta(seconds=timeout_s)
        self._device = torch.device(device)
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._round = 0
        store = TCPStore(
            host,
            port,
            is_master=rank == 0,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
        make = _gloo if self._device.type == "cpu" else _nccl
        self._store = PrefixStore(NAME, store)
        self._group = make(self._store, rank, size, host, port, limit)
        self.broadcast(torch.zeros(1, device=self._device))  # all ranks are there

    def begin(self) -> None:
        """Rank 0 waits until all others have called this. Nothing is sent before, so a rank that
        refuses an update does not get its tensors with the next one. Raises RuntimeError."""
        key = f"round {self._round + 1}"
        if self._rank:
            self._store.add(key, 1)
        deadline = time.monotonic() + self._timeout_s
        while not self._rank and (count := self._store.add(key, 0)) < self._size - 1:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"after {self._timeout_s:g} s, {count} of {self._size - 1} ranks of the "
                    "engines read the weights; the answer to update_weights says why"
                )
            time.sleep(POLL_S)
        self._round += 1

    def broadcast(self, tensor: Tensor) -> None:
        """Send a contiguous tensor of rank 0 to all others, which get it in this one."""
        data = tensor.view(-1).view(torch.uint8)  # gloo does not know all types
        if not data.numel():
            return
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([data], options).wait()
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Leave the group."""
        shutdown = getattr(self._group, "shutdown", None)
        if shutdown is not None:
            shutdown()
        self._group = None


def _gloo(store: Any, rank: int, size: int, host: str, port: int, limit: timedelta) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [gloo.create_device(hostname=_own_address(host, port))]
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, host: str, port: int, limit: timedelta) -> Any:
    if not distributed.is_nccl_available():
        raise RuntimeError("this torch has no NCCL; install one that is built for GPUs")
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = limit
    return nccl(store, rank, size, options)


def _own_address(host: str, port: int) -> str:
    """Return the IP address under which the others reach this process."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # of a datagram socket: only the route is looked up
        return str(probe.getsockname()[0])
