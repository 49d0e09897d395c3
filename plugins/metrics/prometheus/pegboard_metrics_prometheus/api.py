"""The api `prometheus`: GET /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pegboard.errors import ConfigError
from pegboard.interfaces.api import ApiSetup
from pegboard_metrics_prometheus.sink import PrometheusSink


class PrometheusApi:
    """Shows the sink of the same name in this process. Raises ConfigError when that does not run."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        sink = next((sink for sink in setup.sinks.values() if isinstance(sink, PrometheusSink)), None)
        if sink is None:
            raise ConfigError(
                "api:prometheus shows what metrics:prometheus adds up, and that is not enabled; enable both or disable both"
            )
        self._registry = sink.registry

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/metrics", self.metrics, methods=["GET"])]

    async def metrics(self, request: Request) -> Response:
        """All metrics, or those that `name[]` names, in the format the client accepts (text unless it asks for OpenMetrics)."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        names = request.query_params.getlist("name[]")
        registry = self._registry.restricted_registry(names) if names else self._registry
        return Response(encode(registry), headers={"Content-Type": content_type})

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return {"error": {"message": message, "type": "invalid_request_error", "param": parameter, "code": status}}
