"""The api `prometheus`: GET /metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pegboard.errors import ConfigError
from pegboard.interfaces.api import ApiSetup
from pegboard_metrics_prometheus.sink import PrometheusSink

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusApi:
    """Serves the totals of the sink `prometheus` in this process. Raises ConfigError when that sink
    is not enabled."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        sink = next(
            (sink for sink in setup.sinks.values() if isinstance(sink, PrometheusSink)), None
        )
        if sink is None:
            raise ConfigError(
                "api:prometheus serves the totals of metrics:prometheus, which is not enabled; "
                "enable both or disable both"
            )
        self._registry = sink.registry

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/metrics", self.metrics, methods=["GET"])]

    async def metrics(self, request: Request) -> Response:
        """Returns all metrics, or those that `name[]` names, as text. The format is always this
        one: the library's OpenMetrics writer replaces the colon in sample names, and then
        dashboards do not find them."""
        names = set(request.query_params.getlist("name[]"))
        registry = _Some(self._registry, names) if names else self._registry
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE})

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return {
            "error": {
                "message": message,
                "type": "invalid_request_error",
                "param": parameter,
                "code": status,
            }
        }


class _Some(Collector):
    """Yields the metrics of a registry that are requested by their own name or by the name of a
    sample."""

    def __init__(self, registry: CollectorRegistry, names: set[str]) -> None:
        self._registry = registry
        self._names = names

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            if family.name not in self._names:
                family.samples = [sample for sample in family.samples if sample.name in self._names]
            if family.samples:
                yield family
