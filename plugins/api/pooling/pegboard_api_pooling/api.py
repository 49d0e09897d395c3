"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
import uuid
from array import array
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pegboard.data.output import RequestOutput
from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import PegboardError, RequestError
from pegboard.interfaces.api import ApiSetup, Prompt, RequestOptions
from pegboard_chat.off_loop import off_loop
from pegboard_chat.prompt_field import read_prompts
from pegboard_chat.request_body import parse_body
from pegboard_chat.sampling_fields import Fields, Int32
from pegboard_server.json_api import endpoint, error_body, in_pieces, served_model
from pegboard_server.streaming import while_connected

MAX_INPUTS = 1024
"""The number of inputs of one request, if the server has no setting."""


class EmbeddingRequest(Fields):
    """POST /v1/embeddings. `prompt_field.read_prompts` checks input, PoolingParams the ranges."""

    input: Any = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None
    add_special_tokens: bool = True
    use_activation: bool | None = None
    priority: Int32 = 0
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    cache_salt: str | None = None
    user: str | None = None  # accepted and ignored, because it does not concern the answer


class PoolingApi:
    """The vectors of texts."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._client = setup.client
        self._most = setup.settings.get("max_prompts_per_request", MAX_INPUTS)

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/v1/embeddings", endpoint(self._embed, EmbeddingRequest), methods=["POST"])]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _embed(self, http: Request) -> Response:
        """The vector of every input."""
        body = await http.body()

        def read() -> tuple[EmbeddingRequest, list[Prompt], PoolingParams]:
            request = parse_body(body, EmbeddingRequest)
            return request, read_inputs(request, self._most), pooling_params(request)

        request, prompts, params = await off_loop(len(body), read)
        model, lora = await served_model(self._client, request.model)
        chosen = http.headers.get("x-request-id") or request.request_id or uuid.uuid4().hex
        name = f"embd-{chosen}"
        run = f"{name}-{uuid.uuid4().hex[:8]}"  # a client may use one id for two requests at once
        asked = [
            (prompt, params, RequestOptions(request_id=f"{run}-{index}", priority=request.priority, lora=lora))
            for index, prompt in enumerate(prompts)
        ]
        outputs = await while_connected(http.receive, self._all(asked))
        answer = await off_loop(
            sum(len(output.embedding) for output in outputs),
            lambda: in_pieces(whole(name, model, outputs, request.encoding_format)),
        )
        return Response(answer, media_type="application/json")

    async def _all(self, asked: Sequence[tuple[Prompt, PoolingParams, RequestOptions]]) -> list[RequestOutput]:
        """Return the outputs of all prompts. The first error ends all of them."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(*each)) for each in asked]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, prompt: Prompt, params: PoolingParams, options: RequestOptions) -> RequestOutput:
        async with aclosing(self._client.generate(prompt, params, options)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if output.embedding:
                    return output
        raise PegboardError(f"request {options.request_id} ended without a vector; the log of the server says why")


def read_inputs(request: EmbeddingRequest, most: int) -> list[Prompt]:
    """Return the inputs as prompts. Raises RequestError, which names the field that is wrong."""
    if request.cache_salt == "":
        raise RequestError("cache_salt must not be empty", parameter="cache_salt")
    salt, prompts = request.cache_salt, read_prompts(request.input, most, "input")
    return [
        Prompt(text=each, add_special_tokens=request.add_special_tokens, cache_salt=salt)
        if isinstance(each, str)
        else Prompt(token_ids=each, add_special_tokens=False, cache_salt=salt)
        for each in prompts
    ]


def pooling_params(request: EmbeddingRequest) -> PoolingParams:
    """Return the parameters of all inputs. Raises RequestError, which names the field that is wrong."""
    return PoolingParams(
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        dimensions=request.dimensions,
        use_activation=request.use_activation,
    )


def whole(name: str, model: str, outputs: Sequence[RequestOutput], encoding: Literal["float", "base64"]) -> dict[str, Any]:
    """Return the answer. encoding: how vectors are written."""
    num_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    return {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [
            {"index": index, "object": "embedding", "embedding": encoded(output.embedding, encoding)}
            for index, output in enumerate(outputs)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0, "prompt_tokens_details": None},
    }


def encoded(vector: bytes, encoding: Literal["float", "base64"]) -> list[float] | str:
    """Return the float32 values as numbers, or as base64 of their little-endian bytes."""
    values = array("f", vector)
    if encoding == "float":
        return values.tolist()
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()
