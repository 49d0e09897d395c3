"""Which metrics sinks run in which process, and which plugins `otlp_traces_endpoint` enables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.config.schema import EngineConfig, PluginConfig, Settings, check_engine
from pegboard.errors import ConfigError, PluginNotFound
from pegboard.plan.ambient import build_sinks, metrics_flags, sink_entries, with_enabled
from pegboard.plugins.registry import Registry
from pegboard_testing.fake_distributions import FakeDistributions

SOURCE = """
from pegboard.interfaces.metrics import MetricsSpec

HERE = "acme_sinks:Sink"
E = MetricsSpec(api="1.0", implementation=HERE)
A = MetricsSpec(api="1.0", implementation=HERE, process="api")
T = MetricsSpec(
    api="1.0", implementation=HERE, options="acme_sinks:Options", flags=frozenset({"requests", "traces"})
)


class Sink:
    declare = publish = close = print

    def __init__(self, options, setup):
        self.options, self.setup = options, setup


def __getattr__(name):
    if name != "Options":
        raise AttributeError(name)
    from pydantic import BaseModel, ConfigDict

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        endpoint: str | None = None
        collect: tuple[str, ...] = ()

    return Options
"""  # noqa: E501

Make = Callable[..., tuple[Registry, Settings]]


@pytest.fixture
def make(fake_distributions: FakeDistributions) -> Make:
    """Install three sinks: one for the engine, one for the API process, one for traces."""

    def make(
        *, has_traces: bool = True, plugins: dict[str, Any] | None = None, **engine: Any
    ) -> tuple[Registry, Settings]:
        names = {"engine": "E", "api": "A", **({"spans": "T"} if has_traces else {})}
        points = {"metrics": {name: f"acme_sinks:{spec}" for name, spec in names.items()}}
        fake_distributions.add("acme-sinks", points, {"acme_sinks": SOURCE})
        config = PluginConfig(**{"enable": ["metrics:engine", "metrics:api"], **(plugins or {})})
        registry = Registry(fake_distributions.scan(), config)
        return registry, Settings(EngineConfig(**engine), plugins=config)

    return make


def names_of(registry: Registry, settings: Settings) -> dict[str, list[str]]:
    return {
        process: [entry.name for entry in sink_entries(registry, settings.engine, process)]
        for process in ("engine", "api")
    }


def test_each_sink_is_built_in_its_process(make: Make) -> None:
    registry, settings = make()
    registry = with_enabled(registry, settings)
    assert names_of(registry, settings) == {
        "engine": ["engine"],
        "api": ["api"],
    } and "requests" not in metrics_flags(registry)
    (sink,) = build_sinks(registry, settings.engine, "m", "api").values()
    assert sink.setup.model_name == "m"  # type: ignore[attr-defined]


def test_an_endpoint_switches_traces_on(make: Make) -> None:
    registry, settings = make(
        otlp_traces_endpoint="grpc://here:1", collect_detailed_traces=["model"]
    )
    registry = with_enabled(registry, settings)
    assert names_of(registry, settings)["engine"] == [
        "engine",
        "spans",
    ] and "requests" in metrics_flags(registry)
    options = registry.options(registry.find("metrics", "spans"))
    assert options.endpoint == "grpc://here:1" and options.collect == ("model",)
    again = Registry.from_lock(registry.lock())
    same = again.options(again.find("metrics", "spans"))
    assert same.model_dump() == options.model_dump() and "requests" in metrics_flags(again), (
        "the engine process does the same"
    )


def test_without_statistics_requests_are_still_traced(make: Make) -> None:
    registry, settings = make(otlp_traces_endpoint="grpc://here:1", disable_log_stats=True)
    registry = with_enabled(registry, settings)
    assert names_of(registry, settings) == {"engine": ["spans"], "api": ["api"]}


def test_an_option_wins_over_the_setting(make: Make) -> None:
    plugins = {"options": {"metrics.spans": {"endpoint": "grpc://there:2"}}}
    registry, settings = make(plugins=plugins, otlp_traces_endpoint="grpc://here:1")
    registry = with_enabled(registry, settings)
    assert registry.options(registry.find("metrics", "spans")).endpoint == "grpc://there:2"


def test_no_sink_to_export_traces(make: Make) -> None:
    registry, settings = make(has_traces=False, otlp_traces_endpoint="grpc://here:1")
    with pytest.raises(
        PluginNotFound, match="otlp_traces_endpoint needs a metrics plugin that exports traces"
    ):
        with_enabled(registry, settings)


def test_a_disabled_sink_stays_off(make: Make) -> None:
    registry, settings = make(
        plugins={"disable": ["metrics:spans"]}, otlp_traces_endpoint="grpc://here:1"
    )
    with pytest.raises(PluginNotFound, match="none runs"):
        with_enabled(registry, settings)


def test_traces_without_an_endpoint_are_refused_before_the_model_loads(make: Make) -> None:
    registry, settings = make(plugins={"enable": ["metrics:spans"]})
    with pytest.raises(
        ConfigError,
        match="metrics:spans exports traces, but has no address: set otlp_traces_endpoint",
    ):
        with_enabled(registry, settings)


def test_details_need_traces() -> None:
    with pytest.raises(ConfigError, match="collect_detailed_traces needs otlp_traces_endpoint"):
        check_engine(EngineConfig(collect_detailed_traces=["all"]))


@pytest.mark.parametrize("version", ["latest", "new", "0", "v0.12", "0.x"])
def test_a_wrong_version_is_refused_before_the_model_loads(version: str) -> None:
    with pytest.raises(
        ConfigError, match=f"expected a version of vLLM such as 0.12, got '{version}'"
    ):
        check_engine(EngineConfig(show_hidden_metrics_for_version=version))
