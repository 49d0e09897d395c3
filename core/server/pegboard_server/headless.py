"""`pegboard serve --headless`: the ranks of a host that has neither a server nor an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard.engine.boundary.spawn import Child
from pegboard.engine.executors import choose_executor, hosts_of
from pegboard.errors import ConfigError
from pegboard.interfaces.executor import ExecutorSpec, HostSetup
from pegboard.plugins.importing import import_part
from pegboard.plugins.registry import Registry

if TYPE_CHECKING:
    from pegboard.config.schema import Settings


def run_ranks(settings: "Settings", on_started: Callable[[], object] = lambda: None) -> int:
    """Run the ranks of this host until the engine ends. Return 0 if it has stopped in order, else
    1. on_started: called before they run."""
    config = settings.engine
    hosts = hosts_of(config)
    if hosts is None or not hosts.number:
        raise ConfigError(
            "headless runs the ranks of another host than the server's: give the number of this "
            "one, from 1 on, with --node-rank"
        )
    registry = Registry.discover(settings.plugins)
    entry = choose_executor(registry, config)
    spec = registry.spec(entry)
    assert isinstance(spec, ExecutorSpec)
    host = spec.host
    if host is None:
        raise ConfigError(f"the executor {entry.name} has no headless hosts; use the executor mp")
    run_host: Callable[[HostSetup], int] = import_part(entry, host, "host")
    on_started()
    return run_host(HostSetup(hosts, config.num_ranks // hosts.count, Child))
