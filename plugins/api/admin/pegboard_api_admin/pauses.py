"""The routes of the api `admin` that pause the engine, let it sleep, and end requests. They are
vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.interfaces.api import EngineClient
from pegboard_api_admin.bodies import described, read_body
from pegboard_api_admin.query import read_query

MODES = ("abort", "wait", "keep")
TAGS = ("weights", "kv_cache", "scheduling")


class AbortBody(BaseModel):
    """Body of POST /abort_requests: ids of answers, as clients see them. Unknown ids are ignored,
    because the request may just have finished."""

    model_config = ConfigDict(extra="forbid")

    request_ids: list[str]


class PauseRoutes:
    """POST /pause, /resume, /sleep, /wake_up and /abort_requests, GET /is_paused and
    /is_sleeping."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/is_paused", self._is_paused, methods=["GET"]),
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/wake_up", self._wake_up, methods=["POST"]),
            Route("/is_sleeping", self._is_sleeping, methods=["GET"]),
            Route("/abort_requests", described(self._abort_requests, AbortBody), methods=["POST"]),
        ]

    async def _pause(self, request: Request) -> Response:
        """Stop computing; requests that arrive wait. ?mode=abort (the default), wait or keep says
        how the running ones are treated. ?clear_cache=false keeps the prefix cache. Answers when
        the engine has stopped."""
        flags = ("true", "false", "1", "0")
        query = read_query(request, {"mode": MODES, "clear_cache": flags})
        clears = query.get("clear_cache", "true") in ("true", "1")
        mode = query.get("mode", "abort")
        await self._client.control("pause", mode=mode, clear_cache=clears)
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        """End a pause, and serve the requests that have arrived meanwhile."""
        read_query(request, {})
        await self._client.control("resume")
        return JSONResponse({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Response:
        """Whether the engine is paused or sleeps."""
        read_query(request, {})
        return JSONResponse({"is_paused": bool(await self._client.control("is_paused"))})

    async def _sleep(self, request: Request) -> Response:
        """Pause and release memory. ?level=0 releases none; 1 (the default) the KV cache, and the
        weights after they were saved; 2 both, and the weights are read from the checkpoint again.
        ?mode= as in /pause. Needs --enable-sleep-mode."""
        query = read_query(request, {"level": ("0", "1", "2"), "mode": MODES})
        level = int(query.get("level", "1"))
        await self._client.control("sleep", level=level, mode=query.get("mode", "abort"))
        return Response()

    async def _wake_up(self, request: Request) -> Response:
        """Take the memory again: all of it, or that of ?tags=weights or ?tags=kv_cache. Then the
        engine serves."""
        read_query(request, {"tags": TAGS})
        await self._client.control("wake_up", tags=request.query_params.getlist("tags") or None)
        return Response()

    async def _is_sleeping(self, request: Request) -> Response:
        """Whether the engine sleeps, even if only a part of its memory is missing."""
        read_query(request, {})
        return JSONResponse({"is_sleeping": bool(await self._client.control("is_sleeping"))})

    async def _abort_requests(self, request: Request) -> Response:
        """End requests with finish reason "abort"."""
        read_query(request, {})
        body = read_body(await request.body(), AbortBody)
        await self._client.control("abort", request_ids=body.request_ids)
        return Response()
