"""GET /metrics through the server's gateway."""

from __future__ import annotations

import pytest
from pegboard_metrics_prometheus.api import PrometheusApi
from pegboard_metrics_prometheus.options import PrometheusOptions
from pegboard_metrics_prometheus.plugin import API
from pegboard_metrics_prometheus.sink import PrometheusSink
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from pegboard.engine.metrics.catalogue import engine_metrics
from pegboard.errors import ConfigError
from pegboard.interfaces.api import ApiSetup, ApiSpec
from pegboard.interfaces.metrics import MetricsSetup
from pegboard_server.app import build_app
from pegboard_server.http_metrics import HTTP_METRICS
from pegboard_server.settings import ServerConfig
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.fake_limits import fake_limits


class OtherApi:
    """An api whose routes are measured."""

    def routes(self) -> list[Route]:
        return [
            Route("/items/{name}", self.item, methods=["GET", "POST"]),
            Route("/stream", self.stream),
            Route("/fails", self.fails),
        ]

    async def item(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse("x" * 10)

    async def stream(self, request: Request) -> StreamingResponse:
        return StreamingResponse(iter(["a", "b"]))

    async def fails(self, request: Request) -> None:
        raise ZeroDivisionError

    def error_body(self, status: int, message: str, parameter: str | None) -> dict[str, str]:
        return {"error": message}


def make_sink() -> PrometheusSink:
    sink = PrometheusSink(PrometheusOptions(), MetricsSetup("m"))
    sink.declare([*HTTP_METRICS, *engine_metrics(fake_limits())])
    return sink


def make_client(sink: PrometheusSink | None = None, **config: object) -> TestClient:
    sink = sink or make_sink()
    engine = FakeEngineClient()
    api = PrometheusApi(None, ApiSetup(engine, {}, {"prometheus": sink}))
    apis = [
        ("prometheus", api, API),
        ("other", OtherApi(), ApiSpec(api="1.0", implementation="x:Y")),
    ]
    app = build_app(apis, engine, ServerConfig(**config), publish=sink.publish)  # type: ignore[arg-type]
    return TestClient(app, raise_server_exceptions=False)


def values(client: TestClient, name: str) -> dict[tuple[str, ...], float]:
    """Label values (in the order of the labels' names) → value."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for sample in samples
    }


def test_http_requests_are_measured() -> None:
    client = make_client()
    for path in ("/items/1", "/items/2", "/stream", "/fails", "/nowhere", "/metrics"):
        client.get(path)
    client.post("/items/3", json={"a": 1})
    client.request("BREW", "/items/3")
    assert values(client, "http_requests_total") == {
        ("/items/{name}", "GET", "2xx"): 2,
        ("/items/{name}", "POST", "2xx"): 1,
        ("/items/{name}", "other", "4xx"): 1,
        ("/stream", "GET", "2xx"): 1,
        ("/fails", "GET", "5xx"): 1,
        ("none", "GET", "4xx"): 1,
    }
    assert values(client, "http_request_size_bytes_sum")["/items/{name}",] == len('{"a":1}')
    assert values(client, "http_response_size_bytes_count")["/items/{name}",] == 4
    assert values(client, "http_response_size_bytes_sum")["/stream",] == 0
    assert values(client, "http_request_duration_highr_seconds_count")[()] == 7
    assert values(client, "http_request_duration_seconds_count")["/items/{name}", "GET"] == 2


def test_the_format_is_text_and_names_keep_their_colon() -> None:
    """The format stays the same when the client asks for another one, in which the library would
    change names."""
    sink = make_sink()
    client = make_client(sink)
    for accept in (
        "*/*",
        "application/openmetrics-text; version=1.0.0",
        "text/plain; version=1.0.0; escaping=underscores",
    ):
        answer = client.get("/metrics", headers={"Accept": accept})
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "vllm:num_requests_running{" in answer.text


def test_some_metrics_can_be_asked_for() -> None:
    client = make_client()
    client.get("/items/1")
    some = client.get(
        "/metrics",
        params={
            "name[]": ["http_request_duration_highr_seconds_count", "vllm:num_requests_running"]
        },
    )
    lines = [line for line in some.text.splitlines() if not line.startswith("#")]
    assert lines == [
        "http_request_duration_highr_seconds_count 1.0",
        'vllm:num_requests_running{engine="0",model_name="m"} 0.0',
    ]


def test_the_key_guards_it() -> None:
    client = make_client(api_key=["secret"])
    assert client.get("/metrics").status_code == 401
    answer = client.get("/metrics", headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 200 and "process_cpu_seconds_total" in answer.text


def test_without_its_sink_the_route_has_nothing_to_show() -> None:
    with pytest.raises(ConfigError, match="metrics:prometheus"):
        PrometheusApi(None, ApiSetup(FakeEngineClient()))
