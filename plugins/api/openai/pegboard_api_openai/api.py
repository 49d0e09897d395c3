"""The api `openai`: its routes."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pegboard.errors import MalformedRequest, UnknownModel
from pegboard.interfaces.api import ApiSetup, ServedModel
from pegboard_api_openai.chat import ChatRoute
from pegboard_api_openai.completions import CompletionRoute
from pegboard_api_openai.fields import ChatRequest, CompletionRequest, TokenRequest
from pegboard_api_openai.generate import TokenRoute
from pegboard_chat.off_loop import off_loop
from pegboard_chat.request_body import decode_body
from pegboard_server.json_api import endpoint, error_body, json_response

Answer = Callable[[Request], Awaitable[Response]]


class OpenAIApi:
    """Chat completions, text completions and models, as OpenAI's API and vLLM's extensions define
    them."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._client = setup.client
        self._settings = setup.settings

    def routes(self) -> Sequence[BaseRoute]:
        chat = ChatRoute(self._client, self._settings)
        completion = CompletionRoute(self._client, self._settings)
        return [
            Route("/v1/chat/completions", endpoint(chat.answer, ChatRequest), methods=["POST"]),
            Route(
                "/v1/completions", endpoint(completion.answer, CompletionRequest), methods=["POST"]
            ),
            Route(
                "/inference/v1/generate",
                endpoint(TokenRoute(self._client).answer, TokenRequest),
                methods=["POST"],
            ),
            Route(
                "/invocations", endpoint(_by_body(chat.answer, completion.answer)), methods=["POST"]
            ),
            Route("/v1/models", self._list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._show_model, methods=["GET"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _list_models(self, request: Request) -> Response:
        """The served models: base names first, then adapters."""
        return json_response(
            {"object": "list", "data": [_model_card(model) for model in self._client.models()]}
        )

    async def _show_model(self, request: Request) -> Response:
        """One served model."""
        name = request.path_params["model"]
        for model in self._client.models():
            if model.name == name:
                return json_response(_model_card(model))
        raise UnknownModel(f"The model `{name}` does not exist.", parameter="model")


def _by_body(chat: Answer, completion: Answer) -> Answer:
    async def invoke(http: Request) -> Response:
        """A chat or text completion, depending on the body. SageMaker calls this route."""
        body = await http.body()
        given = await off_loop(len(body), lambda: decode_body(body))
        if ("messages" in given) == ("prompt" in given or "prompt_embeds" in given):
            raise MalformedRequest(
                "expected either messages, as for a chat, or prompt, as for a completion",
                parameter="messages",
            )
        return await (chat if "messages" in given else completion)(http)

    return invoke


def _model_card(model: ServedModel) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex}",
        "object": "model_permission",
        "created": model.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "pegboard",
        "root": model.root,
        "parent": model.parent,
        "max_model_len": model.max_model_len,
        "permission": [permission],
    }
