"""Starts the engines of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.config.data_parallel import engine_numbers, engines_here
from pegboard.engine.boundary.engines import Engines, start_processes
from pegboard.env import required_cluster_key
from pegboard.errors import ConfigError
from pegboard_server.watchdog import WatchedEngine

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.engine.boundary.client import EngineProcess
    from pegboard_server.other_hosts import EngineHosts


def start_engines(settings: "Settings") -> "EngineProcess | Engines":
    """Start the engines that run on this host, and listen for the hosts of the others. Raises
    ConfigError."""
    config = settings.engine
    local = engines_here(config)
    is_alone = config.data_parallel_launcher is None
    if config.enable_elastic_ep and is_alone and len(local) < config.data_parallel_size:
        raise ConfigError(
            "enable_elastic_ep needs one server that starts all engines; remove "
            "data_parallel_size_local, data_parallel_rank and the flags of hybrid balancing"
        )
    hosts: "EngineHosts | None" = None
    if not is_alone:
        from pegboard_server.launched_hosts import LaunchedHosts

        hosts = LaunchedHosts(settings)
    elif len(local) < len(engine_numbers(config)):
        from pegboard_server.other_hosts import EngineHosts

        key = required_cluster_key("engines")
        hosts = EngineHosts(config, config.data_parallel_address or "", key)
    if config.enable_elastic_ep:
        from pegboard_server.elastic import ElasticEngines

        return ElasticEngines(local, WatchedEngine, hosts)
    if hosts is not None:
        return Engines(local, WatchedEngine, hosts)
    return start_processes(config, WatchedEngine)
