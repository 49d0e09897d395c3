"""Which plugins serve built-in tools, and what `tool_server` switches on. Knows flags of specs, no plugin by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pegboard.errors import PluginNotFound
from pegboard.plugins.names import missing_providers

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.plugins.registry import Registry

KIND = "builtin_tool"
TOOL_SERVERS = "tool_servers"
"""Flag of a plugin that is a client of tool servers."""


def with_tool_servers(registry: "Registry", settings: "Settings") -> "Registry":
    """The registry, with what `tool_server` enables: every installed client of tool servers, unless it is disabled.

    Raises PluginNotFound when there is none."""
    servers = settings.server.tool_server
    if not servers:
        return registry
    policy = registry.policy
    clients = [
        entry
        for entry in registry.entries(KIND)
        if TOOL_SERVERS in registry.spec(entry).flags and f"{KIND}:{entry.name}" not in policy.disable
    ]
    if not clients:
        advice = missing_providers(KIND, registry.names(KIND))
        raise PluginNotFound(f"tool_server needs a plugin of kind {KIND} that is a client of such servers; {advice}".rstrip("; "))
    options = {key: dict(values) for key, values in policy.options.items()}
    for entry in clients:
        options.setdefault((KIND, entry.name), {}).setdefault("servers", servers)
    enable = tuple(dict.fromkeys([*policy.enable, *(f"{KIND}:{entry.name}" for entry in clients)]))
    return type(registry)(registry.scan, replace(policy, enable=enable, options=options))
