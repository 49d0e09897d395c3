"""What the HTTP server measures, under the names of prometheus-fastapi-instrumentator, which dashboards for vLLM read."""

from __future__ import annotations

from pegboard.interfaces.metrics import Metric

COARSE_S = (0.1, 0.5, 1.0)
FINE_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip


def _metric(name: str, kind: str, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()) -> Metric:
    return Metric(name, kind, text, buckets, labels, common=(), prefixed=False)  # type: ignore[arg-type]


HTTP_METRICS: tuple[Metric, ...] = (
    _metric("http_requests_total", "counter", "HTTP requests answered", ("method", "status", "handler")),
    _metric("http_request_size_bytes", "summary", "Content-Length of requests; 0 where there is none", ("handler",)),
    _metric("http_response_size_bytes", "summary", "Content-Length of answers; 0 for streams", ("handler",)),
    _metric(
        "http_request_duration_highr_seconds", "histogram", "From the head of a request to the end of its answer", (), FINE_S
    ),
    _metric(
        "http_request_duration_seconds",
        "histogram",
        "From the head of a request to the end of its answer, by route",
        ("handler", "method"),
        COARSE_S,
    ),
)
