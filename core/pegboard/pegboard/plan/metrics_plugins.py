"""Which metrics sinks run, and in which process. Knows flags of specs, no plugin by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pegboard.errors import ConfigError, PluginNotFound
from pegboard.interfaces.metrics import MetricsSetup, MetricsSink, MetricsSpec
from pegboard.plugins.names import missing_providers

if TYPE_CHECKING:
    from pegboard.config.schema import EngineConfig, Settings
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.discovery import Entry
    from pegboard.plugins.registry import Registry


def spec_of(registry: "Registry", entry: "Entry") -> MetricsSpec:
    spec = registry.spec(entry)
    assert isinstance(spec, MetricsSpec), f"{entry.id} is no metrics plugin"
    return spec


def with_traces(registry: "Registry", settings: "Settings") -> "Registry":
    """The registry, with what `otlp_traces_endpoint` enables: every installed sink that exports traces, unless it is disabled.

    Raises PluginNotFound when there is none, and ConfigError for settings and options of metrics that cannot work: now, not
    after the model has loaded.
    """
    engine = settings.engine
    if engine.otlp_traces_endpoint is not None:
        patterns = set(registry.policy.disable)
        tracing = [
            entry
            for entry in registry.entries("metrics")
            if "traces" in spec_of(registry, entry).flags and f"metrics:{entry.name}" not in patterns
        ]
        if not tracing:
            advice = missing_providers("metrics", registry.names("metrics"))
            raise PluginNotFound(f"otlp_traces_endpoint needs a metrics plugin that exports traces, and none runs; {advice}")
        registry = type(registry)(registry.scan, _traced(registry, tracing, engine))
    for entry in registry.enabled("metrics"):
        options = registry.options(entry)
        if "traces" in spec_of(registry, entry).flags and not getattr(options, "endpoint", None):
            raise ConfigError(
                f"metrics:{entry.name} exports traces, but not where to: set otlp_traces_endpoint to a collector's URL"
            )
    return registry


def _traced(registry: "Registry", tracing: "list[Entry]", engine: "EngineConfig") -> Any:
    policy = registry.policy
    options = {key: dict(values) for key, values in policy.options.items()}
    for entry in tracing:
        own = options.setdefault(("metrics", entry.name), {})
        own.setdefault("endpoint", engine.otlp_traces_endpoint)
        if engine.collect_detailed_traces:
            own.setdefault("collect", engine.collect_detailed_traces)
    enable = tuple(dict.fromkeys([*policy.enable, *(f"metrics:{entry.name}" for entry in tracing)]))
    return replace(policy, enable=enable, options=options)


def sink_entries(registry: "Registry", plan: "EnginePlan", process: str) -> "list[Entry]":
    """The sinks that are built in a process, "engine" or "api". Under `disable_log_stats` nothing is measured, so the engine
    has only those that trace requests."""
    entries = [entry for entry in registry.enabled("metrics") if spec_of(registry, entry).process == process]
    if plan.settings.engine.disable_log_stats and process == "engine":
        entries = [entry for entry in entries if "traces" in spec_of(registry, entry).flags]
    return entries


def build_sinks(registry: "Registry", plan: "EnginePlan", process: str) -> dict[str, MetricsSink]:
    """The sinks of this process, by plugin name."""
    setup = MetricsSetup(plan.model_names[0])
    return {entry.name: registry.build(entry, setup) for entry in sink_entries(registry, plan, process)}


def wants_records(registry: "Registry") -> bool:
    """Some enabled sink asks for a record of every request."""
    return any("requests" in spec_of(registry, entry).flags for entry in registry.enabled("metrics"))
