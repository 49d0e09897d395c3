"""Kind `metrics`: where measurements go. Ambient: runs only when enabled. A failing sink is quarantined, never fatal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pegboard.interfaces.spec import Need, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSpec(Spec):
    """flags: "kv_events" = also wants block stored/removed events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsNeed(Need):
    pass


@dataclass(frozen=True, slots=True)
class MetricsSetup:
    """model_name: label of every metric. interval_s: how often a periodic sink should report."""

    model_name: str
    interval_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Metric:
    """name without prefix ("num_requests_running"); buckets for histograms."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    help: str
    buckets: tuple[float, ...] = ()


@dataclass(slots=True)
class Sample:
    """What changed since the last publish: gauges by value, counters by increment, histograms by observations."""

    time_s: float
    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    observations: Mapping[str, Sequence[float]] = field(default_factory=dict)


class MetricsSink(Protocol):
    def declare(self, metrics: Sequence[Metric]) -> None:
        """Once, before the first publish."""

    def publish(self, sample: Sample) -> None:
        """At most once per step and whenever the engine goes idle. Must not block."""

    def close(self) -> None:
        """Flush; called once."""
