"""Metrics of the HTTP server. They have the names of prometheus-fastapi-instrumentator, because
dashboards for vLLM read these."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pegboard.interfaces.metrics import Metric, Sample, series

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Other methods count as "other", because a client must not be able to create any number of label
values."""

NO_ROUTE = "none"
"""The label `handler` of a path without a route."""

COARSE_S = (0.1, 0.5, 1.0)
FINE_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    2.5,
    3.0,
    3.5,
    4.0,
    4.5,
    5.0,
    7.5,
    10.0,
    30.0,
    60.0,
)


def _metric(
    name: str, kind: str, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> Metric:
    return Metric(name, kind, text, buckets, labels, common=(), prefixed=False)  # type: ignore[arg-type]


HTTP_METRICS: tuple[Metric, ...] = (
    _metric(
        "http_requests_total", "counter", "HTTP requests answered", ("method", "status", "handler")
    ),
    _metric(
        "http_request_size_bytes",
        "summary",
        "Content-Length of requests; 0 if the header is missing",
        ("handler",),
    ),
    _metric(
        "http_response_size_bytes",
        "summary",
        "Content-Length of responses; 0 for streams",
        ("handler",),
    ),
    _metric(
        "http_request_duration_highr_seconds",
        "histogram",
        "Time from the head of a request to the end of its response",
        (),
        FINE_S,
    ),
    _metric(
        "http_request_duration_seconds",
        "histogram",
        "Time from the head of a request to the end of its response, by route",
        ("handler", "method"),
        COARSE_S,
    ),
)


class MeasuredApp:
    """ASGI middleware that measures every request to `app`. routes: their path templates are the
    values of the label `handler`. unmeasured: paths that are not measured. publish receives one
    sample per request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        unmeasured: frozenset[str],
        publish: Callable[[Sample], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.app = app
        self._routes = routes
        self._unmeasured = unmeasured
        self._publish = publish
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        handler = self._handler(scope)
        if handler in self._unmeasured:
            await self.app(scope, receive, send)
            return
        status = 500
        size = 0
        started = self._clock()

        async def send_back(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                size = _length(message.get("headers", ()))
            await send(message)

        try:
            await self.app(scope, receive, send_back)
        finally:
            self._measure(scope, handler, status, size, self._clock() - started)

    def _measure(self, scope: Scope, handler: str, status: int, size: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._publish(
            Sample(
                time.time(),
                counters={series("http_requests_total", method, f"{status // 100}xx", handler): 1},
                observations={
                    series("http_request_size_bytes", handler): [_length(scope["headers"])],
                    series("http_response_size_bytes", handler): [size],
                    "http_request_duration_highr_seconds": [seconds],
                    series("http_request_duration_seconds", handler, method): [seconds],
                },
            )
        )

    def _handler(self, scope: Scope) -> str:
        """The path template of the route that answers, whatever the method."""
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return str(getattr(route, "path", NO_ROUTE))
        return NO_ROUTE


def _length(headers: Sequence[tuple[bytes, bytes]]) -> int:
    value = next((value for name, value in headers if name.lower() == b"content-length"), b"0")
    return int(value) if value.isdigit() else 0
