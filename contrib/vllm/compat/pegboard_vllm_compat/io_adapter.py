"""The route of an IO processor in vLLM's form: POST /pooling with {"data": …}."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pegboard import PoolingRequestOutput
from pegboard.errors import RequestError
from pegboard.interfaces.api import ApiSetup, Prompt
from pegboard_chat.request_body import parse_body
from pegboard_chat.sampling_fields import Fields, Int32
from pegboard_server.json_api import endpoint, error_body, json_response
from pegboard_server.pooling import Run
from pegboard_vllm_compat import finder
from pegboard_vllm_compat.io_interface import IOProcessorRequest, make_io_processor, params_of
from pegboard_vllm_compat.offline import PoolingOutput

FORMS = (
    'expected of the IO processor: texts, {"prompt": text} or {"prompt_token_ids": [ids]}; the '
    "server takes no other prompts from it"
)


class PoolingBody(Fields):
    """The body of a request. user has no effect."""

    data: Any
    model: str | None = None
    task: Literal["plugin"] = "plugin"
    priority: Int32 = 0
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    user: str | None = None


class VllmPooling:
    """Implements `pegboard.interfaces.api.Api`. target: the name of the IO processor."""

    target: ClassVar[str]
    base_model: ClassVar[str] = ""
    shadow: ClassVar[bool] = False

    def __init__(self, options: None, setup: ApiSetup) -> None:
        finder.install(shadow=self.shadow)
        model = self.base_model or setup.client.models()[0].root
        self._processor = make_io_processor(self.target, model, None)
        self._client = setup.client

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/pooling", endpoint(self._pool, PoolingBody), methods=["POST"])]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _pool(self, http: Request) -> Response:
        """What the server's IO processor makes of the data."""
        body = parse_body(await http.body(), PoolingBody)
        run = await Run(self._client, http, "pool", body).start()
        try:
            request = IOProcessorRequest(**body.model_dump())
            given = self._processor.parse_request(request)
            inputs = await self._processor.pre_process_async(given, request_id=run.name)
            params = params_of(self._processor, None)
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f"data: {error}", parameter="data") from error
        prompts = [_prompt(one) for one in (inputs if isinstance(inputs, list) else [inputs])]
        outputs = await run.outputs(prompts, params)

        async def numbered() -> AsyncGenerator[tuple[int, Any], None]:
            for number, output in enumerate(outputs):
                ids = list(output.prompt_token_ids or ())
                cached = output.num_cached_tokens
                yield (
                    number,
                    PoolingRequestOutput(run.name, PoolingOutput(output.pooled()), ids, cached),
                )

        result = await self._processor.post_process_async(numbered(), request_id=run.name)
        answer = self._processor.output_to_response(result)
        if getattr(answer, "request_id", run.name) is None:
            answer.request_id = run.name
        return json_response(answer.model_dump(mode="json"))


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
