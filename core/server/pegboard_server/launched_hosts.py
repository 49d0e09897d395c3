"""Engines on the hosts of a cluster, which a plugin starts (`data_parallel_launcher`). Each is
a host of its own, as if somebody had started `pegboard serve --headless` for it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pegboard.env import CLUSTER_KEY, cluster_key
from pegboard.errors import ConfigError
from pegboard.interfaces.executor import ExecutorSpec, Launcher, LaunchSetup
from pegboard.interfaces.spec import Need
from pegboard.plugins.importing import import_part
from pegboard.plugins.registry import Registry
from pegboard_server.other_hosts import EngineHosts, RemoteEngine

if TYPE_CHECKING:
    from pegboard.config.schema import EngineConfig, Settings


class LaunchedHosts(EngineHosts):
    """The hosts of engines that a launcher starts. Raises ConfigError or PluginError."""

    def __init__(self, settings: "Settings") -> None:
        config = settings.engine
        key = cluster_key() or secrets.token_hex(32)
        self._port = config.data_parallel_rpc_port
        self._early: list[tuple[RemoteEngine, str]] = []
        self._launcher = make_launcher(settings, key)
        try:
            address = self._launcher.connect()
            self._address = config.data_parallel_address or address
            super().__init__(config, self._address, key)
        except BaseException:
            self._launcher.stop()
            raise
        self.total = None  # it changes

    def add(self, number: int) -> RemoteEngine:
        """Start one more engine somewhere."""
        engine = super().add(number)
        flags = {
            "size": number + 1,
            "size-local": 1,
            "start-rank": number,
            "address": self._address,
            "rpc-port": self._port,
        }
        words = [f"--data-parallel-{name}={value}" for name, value in flags.items()]
        self._launcher.launch(["serve", "--headless", *words], partial(self._on_end, engine))
        return engine

    def attach(self) -> None:
        super().attach()
        for engine, reason in self._early:
            self._has_ended(engine, reason)
        self._early.clear()

    def stop(self, *, in_order: bool = False) -> None:
        super().stop(in_order=in_order)
        self._launcher.stop()

    def _on_end(self, engine: RemoteEngine, reason: str) -> None:
        loop = self._loop
        if loop is None:
            self._early.append((engine, reason))
        else:
            loop.call_soon_threadsafe(self._has_ended, engine, reason)

    def _has_ended(self, engine: RemoteEngine, reason: str) -> None:
        if self.engines[engine.number] is engine:  # no newer one has its number
            self.give_up(engine.number, reason)


def make_launcher(settings: "Settings", key: str) -> Launcher:
    """Return the launcher of the plugin that the settings name."""
    config: EngineConfig = settings.engine
    registry = Registry.discover(settings.plugins)
    name = config.data_parallel_launcher or ""
    entry = registry.find("executor", name)
    spec = registry.spec(entry)
    assert isinstance(spec, ExecutorSpec)
    if spec.launcher is None:
        raise ConfigError(
            f"data_parallel_launcher is {name!r}, an executor that does not start engines on other "
            "hosts; expected another one, such as ray"
        )
    make: Callable[..., Launcher] = import_part(entry, spec.launcher, "launcher")
    platform = registry.choose("platform", Need(), explicit=config.device).require().name
    variables = {CLUSTER_KEY: key}
    setup = LaunchSetup(config.num_ranks, config.num_threads, platform, variables)
    return make(registry.options(entry), setup)
