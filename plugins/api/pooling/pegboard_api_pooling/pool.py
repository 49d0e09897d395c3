"""POST /pooling: whatever the model makes of inputs, as vectors or matrices, or what an IO
processor makes of data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from pegboard.errors import RequestError
from pegboard.interfaces.api import EngineClient, Prompt
from pegboard_api_pooling.answers import json_response, results
from pegboard_api_pooling.fields import ClassifyRequest, PoolingRequest
from pegboard_chat.off_loop import off_loop
from pegboard_chat.request_body import parse_body
from pegboard_server.json_api import in_pieces
from pegboard_server.pooling import Run

WITH_DATA = {"data", "task", "model", "priority", "request_id", "user"}
"""The fields of a body with data."""


class PoolingRoute:
    """read_prompts: the prompts of a body."""

    def __init__(
        self, client: EngineClient, read_prompts: Callable[[ClassifyRequest], list[Prompt]]
    ) -> None:
        self._client = client
        self._read_prompts = read_prompts

    async def answer(self, http: Request) -> Response:
        """Results of tokens, vectors or classes of every input, or what data means."""
        body = await http.body()

        def read() -> tuple[PoolingRequest, list[Prompt]]:
            request = parse_body(body, PoolingRequest)
            if request.data is None and request.task != "plugin":
                return request, self._read_prompts(request)
            return request, []

        request, prompts = await off_loop(len(body), read)
        run = await Run(self._client, http, "pool", request).start()
        if not prompts:
            return await self._processed(run, request)
        pooling = self._client.models()[0].pooling
        params = request.params_of((pooling.task, *pooling.tasks) if pooling else ())
        outputs = await run.outputs(prompts, params)
        return await results(run, request, outputs, "pooling", "data")

    async def _processed(self, run: Run, request: PoolingRequest) -> Response:
        """Return what the IO processor makes of the data."""
        if request.data is None:
            raise RequestError("the task plugin needs data", parameter="data")
        if others := sorted(request.model_fields_set - WITH_DATA):
            raise RequestError(
                f"{others[0]} has no effect on data; leave it out", parameter=others[0]
            )
        if request.task not in (None, "plugin"):
            raise RequestError("data is for the task plugin", parameter="task")
        processor = self._client.io_processor()
        pairs = await asyncio.to_thread(processor.prompts, request.data)
        outputs = await run.outputs_of(pairs)
        result = await asyncio.to_thread(processor.answer, request.data, outputs)
        body = {"request_id": run.name, "created_at": int(time.time()), "data": result}
        return json_response(in_pieces(body))
