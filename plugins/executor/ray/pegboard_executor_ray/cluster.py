"""Connects this process to Ray, and finds room for the ranks."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from pegboard.errors import ConfigError
from pegboard_executor_ray.folder import RayFolder
from pegboard_executor_ray.node import this_node
from pegboard_executor_ray.options import RayOptions

ADDRESS = "RAY_ADDRESS"
TOKEN = "RAY_AUTH_TOKEN"
STATISTICS = "RAY_USAGE_STATS_ENABLED"
LOOPBACK = "127.0.0.1"


class Seat(NamedTuple):
    """Where a rank runs. bundle: its number in the placement group. node: the id of its node."""

    bundle: int
    node: str


class Cluster:
    """The connection of the engine to Ray. One that the calling process has made is used, and is
    left open."""

    def __init__(self, options: RayOptions) -> None:
        self._options = options
        self._is_ours = False
        self._folder: RayFolder | None = None
        self._group: PlacementGroup | None = None

    def connect(self, num_cpus: int) -> None:
        """Connect to a cluster, or start a Ray on this machine. num_cpus: how many CPUs that has at
        least. Raises ConfigError."""
        if ray.is_initialized():
            return
        address = self._options.address or os.environ.get(ADDRESS)
        with signals_kept():
            try:
                if address:
                    ray.init(address=address, logging_level=logging.WARNING)
                else:
                    self._start(num_cpus)
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                self._remove_folder()
                raise ConfigError(
                    f"no connection to Ray at {address or 'this machine'}: {error}; expected the "
                    "address of a running cluster in the option address or in RAY_ADDRESS, or "
                    "neither, which starts a Ray on this machine"
                ) from error
        self._is_ours = True

    def _start(self, num_cpus: int) -> None:
        # it tells its makers what it runs otherwise
        os.environ.setdefault(STATISTICS, "0")
        # it writes a secret to the home folder otherwise
        os.environ.setdefault(TOKEN, secrets.token_hex(32))
        self._folder = RayFolder()
        ray.init(
            address="local",
            num_cpus=max(num_cpus, os.cpu_count() or 1),
            include_dashboard=False,
            logging_level=logging.WARNING,
            _temp_dir=self._folder.path,
            _node_ip_address=LOOPBACK,
        )

    def seats(self, ranks: int, needs: Mapping[str, float]) -> list[Seat]:
        """Reserve what each rank needs, and return where they run. The ranks of a node are
        consecutive, and this node is the first. Raises ConfigError if there is no room in time."""
        bundles = [dict(needs) for _ in range(ranks)]
        self._group = placement_group(bundles, strategy=self._options.placement)
        if not self._group.wait(self._options.placement_timeout_s):
            raise ConfigError(no_room(f"{ranks} ranks", needs, self._options))
        nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        here = this_node()
        seats = [Seat(int(bundle), node) for bundle, node in nodes.items()]
        return sorted(seats, key=lambda seat: (seat.node != here, seat.node, seat.bundle))

    @property
    def group(self) -> PlacementGroup:
        assert self._group is not None, "no seats were reserved"
        return self._group

    def close(self) -> None:
        """Give the seats back, and close what `connect` has opened."""
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        self._group = None
        if self._is_ours:
            ray.shutdown()
            self._is_ours = False
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


@contextmanager
def signals_kept() -> Iterator[None]:
    """Give SIGTERM its handler back, which Ray replaces by one that exits at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def no_room(what: str, needs: Mapping[str, float], options: RayOptions) -> str:
    """Return the message for a cluster without room. what: needs so much each."""
    nodes = [amounts(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return (
        f"Ray has no room for {what} with {amounts(needs)} each (placement "
        f"{options.placement}) after {options.placement_timeout_s:g} s: its nodes have "
        f"{'; '.join(nodes)}, of which {amounts(ray.available_resources())} are free. Add nodes, "
        "stop what runs there, or use fewer ranks or threads"
    )


def amounts(resources: Mapping[str, float]) -> str:
    """Return numbers of CPUs and GPUs as a text."""
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
