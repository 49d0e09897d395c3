"""The api `worker_admin`: calls of the workers and new weights while the server runs. It runs only
when enabled, because its clients run methods that the server's owner has added to the workers, and
choose which files of this machine are read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.errors import MalformedRequest, RequestError, brief
from pegboard.interfaces.api import ApiSetup
from pegboard_api_admin.bodies import described, read_body
from pegboard_api_admin.errors import error_body
from pegboard_api_admin.folders import named, resolved
from pegboard_api_admin.options import WorkerOptions
from pegboard_api_admin.query import read_query


class CallBody(BaseModel):
    """Body of POST /collective_rpc. method: the name of a method of the worker extension. timeout:
    seconds."""

    model_config = ConfigDict(extra="forbid")

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)


class InitBody(BaseModel):
    """Body of POST /init_weight_transfer_engine. init_info: where the trainer is, as the plugin of
    --weight-transfer-config defines it."""

    model_config = ConfigDict(extra="forbid")

    init_info: dict[str, Any]


class UpdateBody(BaseModel):
    """Body of POST /update_weights. update_info: `path`, a folder or file with a checkpoint of the
    same model on the engine's machine, or what a trainer sends: `names`, `dtype_names`, `shapes`,
    and what the plugin of --weight-transfer-config needs. mode: how running requests are treated,
    as in /pause."""

    model_config = ConfigDict(extra="forbid")

    update_info: dict[str, Any]
    mode: Literal["abort", "wait", "keep"] = "abort"


class WorkersApi:
    """POST /collective_rpc, /init_weight_transfer_engine and /update_weights."""

    def __init__(self, options: WorkerOptions, setup: ApiSetup) -> None:
        self._client = setup.client
        self._directories = resolved(options.directories)

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/collective_rpc", described(self._collective_rpc, CallBody), methods=["POST"]),
            Route(
                "/init_weight_transfer_engine",
                described(self._init_weight_transfer, InitBody),
                methods=["POST"],
            ),
            Route("/update_weights", described(self._update_weights, UpdateBody), methods=["POST"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _collective_rpc(self, http: Request) -> Response:
        """Call a method of --worker-extension-cls on every worker, between two steps. The results
        are in rank order: objects and lists as they are, everything else as text."""
        read_query(http, {})
        body = read_body(await http.body(), CallBody)
        called = self._client.control(
            "collective_rpc", method=body.method, args=body.args, kwargs=body.kwargs
        )
        try:
            results: Any = await asyncio.wait_for(called, body.timeout)
        except TimeoutError:
            message = (
                f"the workers have not answered within timeout = {body.timeout} s; the method "
                "runs on"
            )
            return JSONResponse(error_body(504, message, "timeout"), 504)
        return JSONResponse({"results": [_shown(result) for result in results]})

    async def _init_weight_transfer(self, http: Request) -> Response:
        """Connect the workers to a trainer in another process. Answers when they are connected.
        Needs --weight-transfer-config."""
        read_query(http, {})
        body = read_body(await http.body(), InitBody)
        await self._client.control("init_weight_transfer_engine", init_info=body.init_info)
        return JSONResponse({"message": "Weight transfer initialized"})

    async def _update_weights(self, http: Request) -> Response:
        """Replace the weights by those of another checkpoint of the same model. Answers when they
        are in use. What was computed with the old ones is not used any more."""
        read_query(http, {})
        body = read_body(await http.body(), UpdateBody)
        info = body.update_info
        if "path" in info or "names" not in info:
            source: dict[str, Any] = {"path": str(await self._path(info))}
        else:
            source = {"update_info": info}
        await self._client.control("update_weights", mode=body.mode, **source)
        return JSONResponse({"message": "Weights updated"})

    async def _path(self, info: Mapping[str, Any]) -> Path:
        """Return the checkpoint that an update names. Raises RequestError."""
        if [*info] != ["path"] or not isinstance(info["path"], str):
            raise MalformedRequest(
                "update_info: expected path, a text, and nothing else; or names, dtype_names and "
                f"shapes of what a trainer sends. Got {brief(sorted(info))}",
                parameter="update_info",
            )
        path = await asyncio.to_thread(named, info["path"], self._directories)
        if path is None:
            raise RequestError(
                "update_info.path: not a checkpoint that clients may name", parameter="path"
            )
        return path


def _shown(result: Any) -> Any:
    return result if result is None or isinstance(result, dict | list) else str(result)
