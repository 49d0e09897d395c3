"""The api `worker_admin`: calls of the workers while the server runs, with vLLM's routes and bodies. It runs only when enabled,
because its clients run methods that the server's owner has added to the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.interfaces.api import ApiSetup
from pegboard_api_admin.bodies import described, read_body
from pegboard_api_admin.errors import error_body
from pegboard_api_admin.query import read_query


class CallBody(BaseModel):
    """Body of POST /collective_rpc. method: the name of a method of the worker extension. timeout: seconds."""

    model_config = ConfigDict(extra="forbid")

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)


class WorkersApi:
    """POST /collective_rpc."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._client = setup.client

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/collective_rpc", described(self._collective_rpc, CallBody), methods=["POST"])]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _collective_rpc(self, http: Request) -> Response:
        """Call a method of --worker-extension-cls on every worker, between two steps. The results are in rank order: objects and
        lists as they are, everything else as text."""
        read_query(http, {})
        body = read_body(await http.body(), CallBody)
        called = self._client.control("collective_rpc", method=body.method, args=body.args, kwargs=body.kwargs)
        try:
            results: Any = await asyncio.wait_for(called, body.timeout)
        except TimeoutError:
            told = f"the workers have not answered within timeout = {body.timeout} s; the method runs on"
            return JSONResponse(error_body(504, told, "timeout"), 504)
        return JSONResponse({"results": [_shown(result) for result in results]})


def _shown(result: Any) -> Any:
    return result if result is None or isinstance(result, dict | list) else str(result)
