"""Which metrics sinks run in which process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.config.schema import EngineConfig, PluginConfig, Settings, check_engine
from pegboard.errors import ConfigError
from pegboard.plan.sinks import build_sinks, metrics_flags, sink_entries
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


ENABLED = ["metrics:engine", "metrics:api"]


@pytest.fixture
def make(fake_distributions: FakeDistributions) -> Make:
    """Install three sinks: one for the engine, one for the API process, one for traces."""

    def make(
        *, enable: list[str] = ENABLED, options: dict[str, Any] | None = None, **engine: Any
    ) -> tuple[Registry, Settings]:
        names = {"engine": "E", "api": "A", "spans": "T"}
        points = {"metrics": {name: f"acme_sinks:{spec}" for name, spec in names.items()}}
        fake_distributions.add("acme-sinks", points, {"acme_sinks": SOURCE})
        config = PluginConfig(enable=enable, options=options or {})
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
    assert names_of(registry, settings) == {
        "engine": ["engine"],
        "api": ["api"],
    } and "requests" not in metrics_flags(registry)
    (sink,) = build_sinks(registry, settings.engine, "m", "api").values()
    assert sink.setup.model_name == "m"  # type: ignore[attr-defined]


def test_a_sink_that_exports_traces_runs_when_enabled(make: Make) -> None:
    options = {"endpoint": "grpc://here:1", "collect": ["model"]}
    registry, settings = make(enable=["metrics:spans"], options={"metrics.spans": options})
    assert names_of(registry, settings)["engine"] == ["spans"]
    assert "requests" in metrics_flags(registry)
    again = Registry.from_lock(registry.lock())
    made = again.options(again.find("metrics", "spans"))
    assert made.endpoint == "grpc://here:1" and made.collect == ("model",), (
        "the engine process does the same"
    )
    assert "requests" in metrics_flags(again)


def test_without_statistics_requests_are_still_traced(make: Make) -> None:
    registry, settings = make(enable=[*ENABLED, "metrics:spans"], disable_log_stats=True)
    assert names_of(registry, settings) == {"engine": ["spans"], "api": ["api"]}


@pytest.mark.parametrize("version", ["latest", "new", "0", "v0.12", "0.x"])
def test_a_wrong_version_is_refused_before_the_model_loads(version: str) -> None:
    with pytest.raises(
        ConfigError, match=f"expected a version of vLLM such as 0.12, got '{version}'"
    ):
        check_engine(EngineConfig(show_hidden_metrics_for_version=version))
