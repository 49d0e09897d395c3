"""Engines on the hosts of a cluster, which a plugin starts (`data_parallel_launcher`). Each is
a host of its own, as if somebody had started `pegboard serve --headless` for it."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
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
        self._early: list[tuple[int, str]] = []
        self._leaving: Counter[int] = Counter()
        self._launcher = make_launcher(settings, key, self._on_end)
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
        self._launcher.launch(number, ["serve", "--headless", *words])
        return engine

    def attach(self) -> None:
        super().attach()
        for number, reason in self._early:
            self.give_up(number, reason)
        self._early.clear()

    def release(self, number: int) -> bool:
        self._leaving[number] += 1
        return super().release(number)

    def stop(self, *, in_order: bool = False) -> None:
        super().stop(in_order=in_order)
        self._launcher.stop()

    def _on_end(self, number: int, reason: str) -> None:
        loop = self._loop
        if self._leaving[number]:  # a new engine may have the number by now
            self._leaving[number] -= 1
        elif loop is None:
            self._early.append((number, reason))
        else:
            loop.call_soon_threadsafe(self.give_up, number, reason)


def make_launcher(settings: "Settings", key: str, on_end: Callable[[int, str], None]) -> Launcher:
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
    setup = LaunchSetup(config.num_ranks, config.num_threads, platform, variables, on_end)
    return make(registry.options(entry), setup)
