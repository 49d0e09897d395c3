"""Starts the engines of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.config.data_parallel import engine_numbers, engines_here
from pegboard.engine.boundary.engines import Engines, start_processes
from pegboard.errors import ConfigError
from pegboard_server.watchdog import WatchedEngine

if TYPE_CHECKING:
    from pegboard.config.schema import EngineConfig
    from pegboard.engine.boundary.client import EngineProcess


def start_engines(config: "EngineConfig") -> "EngineProcess | Engines":
    """Start the engines that run on this host, and listen for the hosts of the others. Raises
    ConfigError."""
    local = engines_here(config)
    if config.enable_elastic_ep:
        if len(local) < config.data_parallel_size:
            raise ConfigError(
                "enable_elastic_ep needs one server that runs all engines on its host; remove "
                "data_parallel_size_local, data_parallel_rank and the flags of hybrid balancing"
            )
        from pegboard_server.elastic import ElasticEngines

        return ElasticEngines(local, WatchedEngine)
    if len(local) < len(engine_numbers(config)):
        from pegboard_server.other_hosts import EngineHosts

        return Engines(local, WatchedEngine, EngineHosts(config))
    return start_processes(config, WatchedEngine)
