"""The api `health`: what load balancers and hosting platforms ask. Needs no API key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.interfaces.api import ApiSetup


class HealthApi:
    """GET /health and GET or POST /ping: 200 while the engine lives, 503 after; no body. GET /version."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._client = setup.client

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/health", self._health, methods=["GET"]),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version, methods=["GET"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return {"error": {"message": message, "param": parameter, "code": status}}

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._client.health().is_alive else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": version("pegboard")})
