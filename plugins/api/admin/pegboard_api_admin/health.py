"""The api `health`: the routes that load balancers and hosting platforms call. Only /load needs an
API key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.interfaces.api import ApiSetup
from pegboard_api_admin.errors import error_body


class HealthApi:
    """GET /health and GET or POST /ping: 200 while the engine is alive, 503 after it has died,
    without a body. GET /version. GET /load."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._client = setup.client

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/health", self._health, methods=["GET"]),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/load", self._load, methods=["GET"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _health(self, request: Request) -> Response:
        """200 while the engine is alive, 503 after it has died. The response has no body."""
        return Response(status_code=200 if self._client.health().is_alive else 503)

    async def _version(self, request: Request) -> Response:
        """Pegboard's version."""
        return JSONResponse({"version": version("pegboard")})

    async def _load(self, request: Request) -> Response:
        """How many prompts this API process has in the engine, running or waiting."""
        return JSONResponse({"server_load": await self._client.control("load")})
