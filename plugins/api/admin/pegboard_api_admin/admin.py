"""The api `admin`: what operators ask a server and tell it to do. It runs only when enabled."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.interfaces.api import ApiSetup
from pegboard_api_admin.errors import error_body
from pegboard_api_admin.options import AdminOptions
from pegboard_api_admin.pauses import PauseRoutes
from pegboard_api_admin.query import read_flags, read_query
from pegboard_api_admin.scaling import ScalingRoutes


class AdminApi:
    """GET /server_info, POST /reset_prefix_cache, GET /v1/pegboard/plugins, and the routes of
    `PauseRoutes` and `ScalingRoutes`. With the option `profile_directory`: POST /start_profile and
    /stop_profile."""

    def __init__(self, options: AdminOptions, setup: ApiSetup) -> None:
        self._client = setup.client
        self._profile_directory = options.profile_directory

    def routes(self) -> Sequence[BaseRoute]:
        profiles = [
            Route("/start_profile", self._start_profile, methods=["POST"]),
            Route("/stop_profile", self._stop_profile, methods=["POST"]),
        ]
        return [
            *(profiles if self._profile_directory is not None else ()),
            Route("/server_info", self._server_info, methods=["GET"]),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
            Route("/reset_mm_cache", self._reset_mm_cache, methods=["POST"]),
            Route("/v1/pegboard/plugins", self._plugins, methods=["GET"]),
            *PauseRoutes(self._client).routes(),
            *ScalingRoutes(self._client).routes(),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _server_info(self, request: Request) -> Response:
        """All settings, where each came from, and the machine. ?config_format=text (the default) or
        json."""
        query = read_query(request, {"config_format": ("text", "json")})
        settings: Any = await self._client.control("settings")
        as_text = query.get("config_format", "text") == "text"
        system = {
            "pegboard": version("pegboard"),
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "machine": platform.machine(),
        }
        return JSONResponse(
            {"pegboard_config": _as_text(settings) if as_text else settings, "system_env": system}
        )

    async def _reset_prefix_cache(self, request: Request) -> Response:
        """Empty the prefix cache. success is false when requests hold cached blocks;
        ?reset_running_requests=true makes those recompute."""
        flags = read_flags(request, "reset_running_requests")
        is_reset = await self._client.control("reset_prefix_cache", **flags)
        return JSONResponse({"success": bool(is_reset)})

    async def _reset_mm_cache(self, request: Request) -> Response:
        """Forget which images, audio and videos were processed."""
        read_query(request, {})
        await self._client.control("reset_mm_cache")
        return Response()

    async def _start_profile(self, request: Request) -> Response:
        """Start the profiler of the device."""
        read_query(request, {})
        await self._client.control("start_profile", path=str(self._profile_directory))
        return Response()

    async def _stop_profile(self, request: Request) -> Response:
        """Stop the profiler, and write what it measured below the option `profile_directory`."""
        read_query(request, {})
        await self._client.control("stop_profile")
        return Response()

    async def _plugins(self, request: Request) -> Response:
        """The installed plugins, and every choice between them with its reasons: first those of the
        API process, then those of the engine."""
        read_query(request, {})
        here: Any = await self._client.control("plugins")
        there: Any = await self._client.control("decisions")
        decisions = [{"process": "api", **decision} for decision in here["decisions"]]
        decisions += [{"process": "engine", **decision} for decision in there]
        return JSONResponse({"installed": here["installed"], "decisions": decisions})


def _as_text(settings: Mapping[str, Any]) -> str:
    """One line per setting: `engine.max_model_len = 4096`."""
    sections = ((name, values) for name, values in settings.items() if isinstance(values, Mapping))
    return "\n".join(
        f"{section}.{name} = {value!r}"
        for section, values in sections
        for name, value in values.items()
    )
