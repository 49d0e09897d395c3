"""For routes of engines that pool: runs the prompts of a request, and reads the vectors."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from starlette.requests import Request

from pegboard.data.output import RequestOutput
from pegboard.data.pooling_params import PoolingParams
from pegboard.data.request import LoRARequest
from pegboard.errors import PegboardError
from pegboard.interfaces.api import EngineClient, Prompt, RequestOptions
from pegboard_server.json_api import served_model
from pegboard_server.streaming import while_connected


class PooledRequest(Protocol):
    """What a run reads of a request's body. model: None = the one that is served."""

    @property
    def model(self) -> str | None: ...
    @property
    def request_id(self) -> str | None: ...
    @property
    def priority(self) -> int: ...


class Run:
    """One request. name: its id in the answer. model: as the answer names it."""

    def __init__(
        self, client: EngineClient, http: Request, kind: str, request: PooledRequest
    ) -> None:
        chosen = http.headers.get("x-request-id") or request.request_id or uuid.uuid4().hex
        self.name = f"{kind}-{chosen}"
        self.model = ""
        self.lora: LoRARequest | None = None
        self._client = client
        self._http = http
        self._request = request

    async def start(self) -> "Run":
        """Find the model. Raises RequestError if there is none of that name."""
        self.model, self.lora = await served_model(self._client, self._request.model)
        return self

    async def outputs(
        self, prompts: Sequence[Prompt], params: PoolingParams
    ) -> list[RequestOutput]:
        """Return the outputs of all prompts. See `outputs_of`."""
        return await self.outputs_of([(prompt, params) for prompt in prompts])

    async def outputs_of(
        self, pairs: Sequence[tuple[Prompt, PoolingParams]]
    ) -> list[RequestOutput]:
        """Return the outputs of all prompts, which end when the client leaves. The first error ends
        all of them."""
        # a client may use one id for two requests at once
        run = f"{self.name}-{uuid.uuid4().hex[:8]}"
        common = RequestOptions(
            request_id=run, response_id=self.name, priority=self._request.priority, lora=self.lora
        )
        asked = [
            (prompt, params, replace(common, request_id=f"{run}-{index}"))
            for index, (prompt, params) in enumerate(pairs)
        ]
        return await while_connected(self._http.receive, self._all(asked))

    async def _all(
        self, asked: Sequence[tuple[Prompt, PoolingParams, RequestOptions]]
    ) -> list[RequestOutput]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(*each)) for each in asked]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(
        self, prompt: Prompt, params: PoolingParams, options: RequestOptions
    ) -> RequestOutput:
        async with aclosing(self._client.generate(prompt, params, options)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if output.embedding_shape is not None:
                    return output
        raise PegboardError(
            f"request {options.request_id} ended without a vector; the log of the server says why"
        )


def values(output: RequestOutput) -> array[float]:
    """Return the numbers of a vector, float32. Those of a matrix come row by row."""
    return array("f", output.embedding)
