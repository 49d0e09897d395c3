"""The route of an IO processor in vLLM's form: POST /pooling with {"data": …}."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pegboard import PoolingRequestOutput
from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import PegboardError, RequestError
from pegboard.interfaces.api import ApiSetup, Prompt, RequestOptions
from pegboard_chat.request_body import parse_body
from pegboard_server.json_api import endpoint, error_body, json_response, served_model
from pegboard_server.streaming import while_connected
from pegboard_vllm_compat import finder
from pegboard_vllm_compat.io_interface import IOProcessorRequest, make_io_processor, params_of
from pegboard_vllm_compat.offline import PoolingOutput

FORMS = (
    'expected of the IO processor: texts, {"prompt": text} or {"prompt_token_ids": [ids]}; the '
    "server takes no other prompts from it"
)


class PoolingBody(BaseModel):
    """The body of a request. user has no effect."""

    model_config = ConfigDict(extra="forbid")

    data: Any
    model: str | None = None
    task: str = "plugin"
    priority: int = 0
    request_id: str | None = None
    user: str | None = None


class VllmPooling:
    """Implements `pegboard.interfaces.api.Api`. target: the name of the IO processor."""

    target: ClassVar[str]
    base_model: ClassVar[str] = ""
    shadow: ClassVar[bool] = False

    def __init__(self, options: None, setup: ApiSetup) -> None:
        finder.install(shadow=self.shadow)
        model = self.base_model or setup.client.models()[0].root
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=model, tokenizer=model, io_processor_plugin=self.target
            )
        )
        self._processor = make_io_processor(self.target, config)
        self._client = setup.client

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/pooling", endpoint(self._pool, PoolingBody), methods=["POST"])]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _pool(self, http: Request) -> Response:
        """What the server's IO processor makes of the data."""
        body = parse_body(await http.body(), PoolingBody)
        if body.task != "plugin":
            raise RequestError('the task of this server is "plugin"', parameter="task")
        _, lora = await served_model(self._client, body.model)
        name = f"pool-{body.request_id or uuid.uuid4().hex}"
        # a client may use one id for two requests at once
        run = f"{name}-{uuid.uuid4().hex[:8]}"
        common = RequestOptions(request_id=run, response_id=name, priority=body.priority, lora=lora)
        try:
            given = self._processor.parse_request(IOProcessorRequest(**body.model_dump()))
            inputs = await self._processor.pre_process_async(given, request_id=name)
            params = params_of(self._processor, None)
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f"data: {error}", parameter="data") from error
        prompts = [_prompt(one) for one in (inputs if isinstance(inputs, list) else [inputs])]
        result = await while_connected(http.receive, self._run(prompts, params, common))
        answer = self._processor.output_to_response(result)
        if getattr(answer, "request_id", name) is None:
            answer.request_id = name
        return json_response(answer.model_dump(mode="json"))

    async def _run(
        self, prompts: Sequence[Prompt], params: PoolingParams, common: RequestOptions
    ) -> Any:
        """Return what the processor makes of the outputs of the prompts."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(number, prompt, params, common))
                    for number, prompt in enumerate(prompts)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        outputs = [task.result() for task in tasks]

        async def numbered() -> AsyncGenerator[tuple[int, Any], None]:
            for pair in enumerate(outputs):
                yield pair

        return await self._processor.post_process_async(numbered(), request_id=common.response_id)

    async def _one(
        self, number: int, prompt: Prompt, params: PoolingParams, common: RequestOptions
    ) -> PoolingRequestOutput[Any]:
        request = f"{common.request_id}-{number}"
        options = replace(common, request_id=request)
        async with aclosing(self._client.generate(prompt, params, options)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if output.embedding:
                    numbers = PoolingOutput(array("f", output.embedding))
                    ids = list(output.prompt_token_ids or ())
                    return PoolingRequestOutput(request, numbers, ids, output.num_cached_tokens)
        raise PegboardError(f"request {request} ended without a vector")


def _prompt(value: Any) -> Prompt:
    """Return a prompt in vLLM's form as Pegboard's. Raises RequestError for other forms."""
    if isinstance(value, str):
        return Prompt(text=value)
    if isinstance(value, dict) and value.keys() == {"prompt"}:
        return Prompt(text=value["prompt"])
    if isinstance(value, dict) and value.keys() == {"prompt_token_ids"}:
        return Prompt(token_ids=value["prompt_token_ids"])
    shown = sorted(value) if isinstance(value, dict) else type(value).__name__
    raise RequestError(f"{FORMS}; got {shown}", parameter="data")
