"""Ambient plugins: which ones a setting enables, and which metrics sinks run in which process. This
module reads the flags of specs and does not know any plugin by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pegboard.config.schema import EngineConfig, Settings
from pegboard.errors import ConfigError, PluginNotFound
from pegboard.interfaces.metrics import MetricsSetup, MetricsSink, MetricsSpec
from pegboard.plugins.discovery import Entry
from pegboard.plugins.names import missing_providers
from pegboard.plugins.registry import Registry


def with_enabled(registry: Registry, settings: Settings) -> Registry:
    """Return the registry with the plugins that settings enable, unless they are disabled: sinks
    that export traces (`otlp_traces_endpoint`), the publisher of KV events (`kv_events_config`) and
    clients of tool servers (`tool_server`).

    Raises PluginNotFound if no installed plugin does this, and ConfigError if a sink has no address
    to export to.
    """
    engine = settings.engine
    servers = settings.server.tool_server
    if engine.otlp_traces_endpoint is not None:
        found = [
            entry for entry in registry.entries("metrics") if "traces" in registry.spec(entry).flags
        ]
        given = {"endpoint": engine.otlp_traces_endpoint, "collect": engine.collect_detailed_traces}
        message = "otlp_traces_endpoint needs a metrics plugin that exports traces"
        registry = _enable(registry, "metrics", found, given, message)
    if engine.kv_events_config:
        registry = _with_kv_events(registry, engine.kv_events_config)
    if servers:
        found = [
            entry
            for entry in registry.entries("builtin_tool")
            if "tool_servers" in registry.spec(entry).flags
        ]
        message = "tool_server needs a builtin_tool plugin that is a client of such servers"
        registry = _enable(registry, "builtin_tool", found, {"servers": servers}, message)
    for entry in registry.enabled("metrics"):
        if "traces" in registry.spec(entry).flags and not getattr(
            registry.options(entry), "endpoint", None
        ):
            raise ConfigError(
                f"metrics:{entry.name} exports traces, but has no address: set "
                "otlp_traces_endpoint to a collector's URL"
            )
    return registry


def _with_kv_events(registry: Registry, config: Mapping[str, Any]) -> Registry:
    """Enable the publisher of KV events. Without a `publisher`, all that are installed publish.
    "null" publishes nothing."""
    given = dict(config)
    enabled = given.pop("enable_kv_cache_events", False)
    publisher = given.pop("publisher", None)
    if not isinstance(enabled, bool) or not isinstance(publisher, str | None):
        raise ConfigError(
            "kv_events_config: expected true or false for enable_kv_cache_events, got "
            f"{enabled!r}, and the name of a plugin or null for publisher, got {publisher!r}"
        )
    if not enabled or publisher == "null":
        return registry
    publishers = [
        entry for entry in registry.entries("metrics") if "kv_events" in registry.spec(entry).flags
    ]
    named = f" named {publisher!r}" if publisher else ""
    message = f"kv_events_config needs a metrics plugin{named} that publishes KV events"
    return _enable(
        registry,
        "metrics",
        [each for each in publishers if publisher in (None, each.name)],
        given,
        message,
    )


def _enable(
    registry: Registry, kind: str, found: list[Entry], given: Mapping[str, Any], message: str
) -> Registry:
    """Enable the plugins in `found` that are not disabled. `given` are their options where the user
    has set none."""
    config = registry.config
    found = [entry for entry in found if f"{kind}:{entry.name}" not in config.disable]
    if not found:
        raise PluginNotFound(
            (f"{message}, and none runs; {missing_providers(kind, registry.names(kind))}").rstrip(
                "; "
            )
        )
    options = {key: dict(values) for key, values in config.options.items()}
    for entry in found:
        own = options.setdefault(f"{kind}.{entry.name}", {})
        own.update(
            {name: value for name, value in given.items() if value is not None and name not in own}
        )
    enable = list(dict.fromkeys([*config.enable, *(f"{kind}:{entry.name}" for entry in found)]))
    return type(registry)(
        registry.scan, msgspec.structs.replace(config, enable=enable, options=options)
    )


def sink_entries(registry: Registry, config: EngineConfig, process: str) -> list[Entry]:
    """Return the sinks that are built in a process, "engine" or "api". With `disable_log_stats`
    nothing is measured, so the engine has only the sinks that trace requests or publish KV
    events."""
    entries = []
    for entry in registry.enabled("metrics"):
        spec = registry.spec(entry)
        assert isinstance(spec, MetricsSpec), f"{entry.id} is not a metrics plugin"
        only_traces = config.disable_log_stats and process == "engine"
        if spec.process == process and (spec.flags & {"traces", "kv_events"} or not only_traces):
            entries.append(entry)
    return entries


def build_sinks(
    registry: Registry, config: EngineConfig, model_name: str, process: str
) -> dict[str, MetricsSink]:
    """Build the sinks of this process. Returns them by plugin name."""
    setup = MetricsSetup(model_name)
    return {
        entry.name: registry.build(entry, setup)
        for entry in sink_entries(registry, config, process)
    }


def metrics_flags(registry: Registry) -> frozenset[str]:
    """Return the flags of MetricsSpec that an enabled sink has."""
    return frozenset().union(*(registry.spec(entry).flags for entry in registry.enabled("metrics")))
