"""The kind `builtin_tool`: its fake passes the contract tests, and only enabled plugins run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pegboard.config.schema import PluginConfig
from pegboard.errors import ConfigError
from pegboard.plugins.registry import Registry
from pegboard_server.app import start_tools
from pegboard_testing.contract_builtin_tool import BuiltinToolContract
from pegboard_testing.fake_builtin_tool import FakeBuiltinTool
from pegboard_testing.fake_distributions import FakeDistributions

SOURCE = """
from pegboard.interfaces.builtin_tool import BuiltinToolSpec

CLIENT = BuiltinToolSpec(
    api="1.0", implementation="acme_tools:Tool", options="acme_tools:Options",
    supports={"type": frozenset({"mcp", "web_search"})},
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

Make = Callable[..., Registry]


@pytest.fixture
def make(fake_distributions: FakeDistributions) -> Make:
    """Install a client of tool servers and a plugin that has its own tool."""

    def make(*enabled: str, **options: Any) -> Registry:
        names = {"own": "OWN", "client": "CLIENT"}
        points = {"builtin_tool": {name: f"acme_tools:{spec}" for name, spec in names.items()}}
        fake_distributions.add("acme-tools", points, {"acme_tools": SOURCE})
        config = PluginConfig(
            enable=[f"builtin_tool:{name}" for name in enabled],
            options={"builtin_tool.client": options} if options else {},
        )
        return Registry(fake_distributions.scan(), config)

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
    assert served(make()) == {}


def test_the_own_tools_of_a_plugin_run_when_enabled(make: Make) -> None:
    assert served(make("own")) == {"mcp": [None]}


def test_a_client_of_tool_servers_runs_when_enabled(make: Make) -> None:
    registry = make("own", "client", servers=["a:1", "b:2"])
    both = [["a:1", "b:2"], None]
    assert served(registry) == {"mcp": both, "web_search": both[:1]}
    assert served(Registry.from_lock(registry.lock())) == served(registry), (
        "each of several API processes does the same"
    )


def test_a_tool_that_cannot_start_says_why(make: Make) -> None:
    with pytest.raises(ConfigError, match="nowhere:1"):
        served(make("client", servers=["nowhere:1"]))
