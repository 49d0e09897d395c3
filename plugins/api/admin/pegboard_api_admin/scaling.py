"""The routes of the api `admin` that change the number of engines. They are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.interfaces.api import EngineClient
from pegboard_api_admin.bodies import described, read_body
from pegboard_api_admin.query import read_query


class ScaleBody(BaseModel):
    """Body of POST /scale_elastic_ep. drain_timeout: seconds that the requests of engines which go
    may take to end."""

    model_config = ConfigDict(extra="forbid", strict=True)

    new_data_parallel_size: int = Field(ge=1)
    drain_timeout: float = Field(120, gt=0, allow_inf_nan=False)


class ScalingRoutes:
    """POST /scale_elastic_ep and /is_scaling_elastic_ep."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/scale_elastic_ep", described(self._scale, ScaleBody), methods=["POST"]),
            Route("/is_scaling_elastic_ep", self._is_scaling, methods=["POST"]),
        ]

    async def _scale(self, request: Request) -> Response:
        """Change the number of engines. Answers when those that are new serve, and those that go
        have ended. 408: their requests took longer than drain_timeout, and nothing has changed.
        Needs --enable-elastic-ep."""
        read_query(request, {})
        body = read_body(await request.body(), ScaleBody)
        size = body.new_data_parallel_size
        await self._client.control(
            "scale_elastic_ep", new_data_parallel_size=size, drain_timeout=body.drain_timeout
        )
        return JSONResponse({"message": f"Scaled to {size} data parallel engines"})

    async def _is_scaling(self, request: Request) -> Response:
        """Whether the number of engines is being changed."""
        read_query(request, {})
        is_scaling = await self._client.control("is_scaling_elastic_ep")
        return JSONResponse({"is_scaling_elastic_ep": bool(is_scaling)})
