"""The kind `builtin_tool`: its fake passes the contract tests, and `tool_server` enables the right
plugins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pegboard.config.schema import PluginConfig, ServerConfig, Settings
from pegboard.errors import ConfigError, PluginNotFound
from pegboard.plan.ambient import with_enabled
from pegboard.plugins.registry import Registry
from pegboard_server.app import start_tools
from pegboard_testing.contract_builtin_tool import BuiltinToolContract
from pegboard_testing.fake_builtin_tool import FakeBuiltinTool
from pegboard_testing.fake_distributions import FakeDistributions

SOURCE = """
from pegboard.interfaces.builtin_tool import BuiltinToolSpec

CLIENT = BuiltinToolSpec(
    api="1.0", implementation="acme_tools:Tool", options="acme_tools:Options",
    supports={"type": frozenset({"mcp", "web_search"})}, flags=frozenset({"tool_servers"}),
)
OWN = BuiltinToolSpec(api="1.0", implementation="acme_tools:Tool", supports={"type": frozenset({"mcp"})})


class Tool:
    def __init__(self, options, setup):
        self.servers = options and options.servers

    async def start(self):
        if self.servers == ["nowhere:1"]:
            from pegboard.errors import ConfigError
            raise ConfigError("nowhere:1 does not answer")

    def session(self, tool, path, response_id): ...


def __getattr__(name):
    if name != "Options":
        raise AttributeError(name)
    from pydantic import BaseModel, ConfigDict

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        servers: list[str] = []

    return Options
"""  # noqa: E501

Make = Callable[..., tuple[Registry, Settings]]


@pytest.fixture
def make(fake_distributions: FakeDistributions) -> Make:
    """Install a client of tool servers and a plugin that has its own tool."""

    def make(
        *, has_client: bool = True, plugins: dict[str, Any] | None = None, **server: Any
    ) -> tuple[Registry, Settings]:
        names = {"own": "OWN", **({"client": "CLIENT"} if has_client else {})}
        points = {"builtin_tool": {name: f"acme_tools:{spec}" for name, spec in names.items()}}
        fake_distributions.add("acme-tools", points, {"acme_tools": SOURCE})
        config = PluginConfig(**(plugins or {}))
        registry = Registry(fake_distributions.scan(), config)
        return registry, Settings(server=ServerConfig(**server), plugins=config)

    return make


class TestFakeBuiltinTool(BuiltinToolContract):
    entry = {"type": "mcp", "server_label": "calc"}
    call = ("calc_add", {"x": 1, "y": 2})
    failing = ("calc_fail", {})
    refused = [({"type": "mcp", "server_label": "calc", "server_url": "http://x"}, "server_url")]

    def tool(self) -> FakeBuiltinTool:
        return FakeBuiltinTool()


def served(registry: Registry) -> dict[str, list[Any]]:
    return {
        kind: [tool.servers for tool in tools]
        for kind, tools in asyncio.run(start_tools(registry)).items()
    }  # type: ignore[attr-defined]


def test_nothing_runs_unless_it_is_enabled(make: Make) -> None:
    registry, settings = make()
    assert with_enabled(registry, settings) is registry and served(registry) == {}


def test_the_own_tools_of_a_plugin_run_when_enabled(make: Make) -> None:
    registry, settings = make(plugins={"enable": ["builtin_tool:own"]})
    assert served(with_enabled(registry, settings)) == {"mcp": [None]}


def test_the_setting_enables_the_clients_of_tool_servers(make: Make) -> None:
    registry, settings = make(tool_server=["a:1", "b:2"], plugins={"enable": ["builtin_tool:own"]})
    registry = with_enabled(registry, settings)
    both = [["a:1", "b:2"], None]
    assert served(registry) == {"mcp": both, "web_search": both[:1]}
    assert served(Registry.from_lock(registry.lock())) == served(registry), (
        "each of several API processes does the same"
    )


def test_an_option_wins_over_the_setting(make: Make) -> None:
    registry, settings = make(
        tool_server=["a:1"], plugins={"options": {"builtin_tool.client": {"servers": ["c:3"]}}}
    )
    assert served(with_enabled(registry, settings))["mcp"] == [["c:3"]]


def test_what_is_disabled_stays_off(make: Make) -> None:
    registry, settings = make(tool_server=["a:1"], plugins={"disable": ["builtin_tool:client"]})
    with pytest.raises(PluginNotFound, match="client of such servers"):
        with_enabled(registry, settings)


def test_without_a_client_the_setting_is_refused(make: Make) -> None:
    registry, settings = make(has_client=False, tool_server=["a:1"])
    with pytest.raises(PluginNotFound, match="tool_server needs a builtin_tool plugin"):
        with_enabled(registry, settings)


def test_a_tool_that_cannot_start_says_why(make: Make) -> None:
    registry, settings = make(tool_server=["nowhere:1"])
    with pytest.raises(ConfigError, match="nowhere:1"):
        served(with_enabled(registry, settings))
