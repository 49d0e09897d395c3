"""POST /label with {"text": "…", "labels": ["…", "…"]} answers {"label": "…"}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.errors import RequestError
from pegboard.interfaces.api import ApiSetup, Prompt, RequestOptions
from pegboard_api_label.options import LabelOptions
from pegboard_server.streaming import while_connected


class Body(BaseModel):
    """The JSON body. Unknown fields are refused. prompt: what the model sees, with {labels} and
    {text}."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = Field(min_length=1)
    labels: list[str] = Field(min_length=2)
    prompt: str = "Choose one of these labels: {labels}\nText: {text}\nLabel: "


class LabelApi:
    def __init__(self, options: LabelOptions, setup: ApiSetup) -> None:
        self._client = setup.client
        self._options = options

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/label", self.label, methods=["POST"])]

    async def label(self, request: Request) -> Response:
        """Answer with one of the labels. When the client leaves, the request ends in the engine
        too."""
        body = self._read(await request.body())
        prompt = body.prompt.replace("{labels}", ", ".join(body.labels)).replace(
            "{text}", body.text
        )
        params = SamplingParams(
            temperature=0,
            max_tokens=None,
            structured_outputs=StructuredOutputsParams(choice=list(body.labels)),
        )
        asked = RequestOptions(request_id=request.state.request_id)
        return JSONResponse(
            {"label": await while_connected(request.receive, self._text(prompt, params, asked))}
        )

    async def _text(self, prompt: str, params: SamplingParams, asked: RequestOptions) -> str:
        text = ""
        async for output in self._client.generate(Prompt(text=prompt), params, asked):
            text = output.outputs[0].text
        return text

    def _read(self, raw: bytes) -> Body:
        try:
            body = Body.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or None
            raise RequestError(f"{name or 'the body'}: {first['msg']}", parameter=name) from error
        if len(body.labels) > self._options.max_labels:
            message = (
                f"labels has {len(body.labels)} items, and api.label.max_labels allows "
                f"{self._options.max_labels}"
            )
            raise RequestError(message, parameter="labels")
        if "" in body.labels or len(set(body.labels)) < len(body.labels):
            raise RequestError("labels has an empty or a repeated item", parameter="labels")
        if "{text}" not in body.prompt:
            raise RequestError(
                "prompt has no {text}, so the model would not see the text", parameter="prompt"
            )
        return body

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return {"error": {"message": message, "parameter": parameter}}
