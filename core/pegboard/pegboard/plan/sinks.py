"""Metrics sinks: which of them run in which process. This module reads the flags of specs and does
not know any plugin by name."""

from __future__ import annotations

from pegboard.config.data_parallel import engine_number
from pegboard.config.schema import EngineConfig
from pegboard.installed import Entry
from pegboard.interfaces.metrics import MetricsSetup, MetricsSink, MetricsSpec
from pegboard.plugins.registry import Registry


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
    setup = MetricsSetup(model_name, engine_number(config))
    return {
        entry.name: registry.build(entry, setup)
        for entry in sink_entries(registry, config, process)
    }


def metrics_flags(registry: Registry) -> frozenset[str]:
    """Return the flags of MetricsSpec that an enabled sink has."""
    return frozenset().union(*(registry.spec(entry).flags for entry in registry.enabled("metrics")))
