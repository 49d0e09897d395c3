"""The apis `tokenize` (/tokenize, /detokenize) and `tokenizer_info`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pegboard.errors import MalformedRequest
from pegboard.interfaces.api import ApiSetup
from pegboard_api_openai.chat import read_chat
from pegboard_api_openai.fields import TemplateFields
from pegboard_chat.chats import ChatRequest, Chats
from pegboard_chat.off_loop import off_loop
from pegboard_chat.openai_format import read_tools
from pegboard_chat.request_body import parse_body
from pegboard_chat.request_limits import PromptLimit
from pegboard_chat.sampling_fields import Fields, Objects, TokenIds
from pegboard_server.json_api import endpoint, error_body, json_response, served_model


class TokenizeRequest(TemplateFields):
    """POST /tokenize: `prompt`, or `messages` and the other fields of a conversation.
    add_special_tokens defaults to true for a prompt. It defaults to false for messages, because the
    template writes special tokens itself."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None  # type: ignore[assignment]
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class TokenizeApi:
    """The apis /tokenize and /detokenize."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._client = setup.client
        self._limit = PromptLimit(setup.client)
        self._chats = Chats(setup.client, setup.settings)

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/tokenize", endpoint(self._tokenize, TokenizeRequest), methods=["POST"]),
            Route("/detokenize", endpoint(self._detokenize, DetokenizeRequest), methods=["POST"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _tokenize(self, http: Request) -> Response:
        """Returns the token ids of a text, or of a conversation that the chat template renders."""
        body = await http.body()
        request = await off_loop(len(body), lambda: parse_body(body, TokenizeRequest))
        await served_model(self._client, request.model)
        ids = await self._ids(request, len(body))
        texts = (
            await off_loop(len(body), lambda: self._texts(ids))
            if request.return_token_strs
            else None
        )
        longest = self._client.models()[0].max_model_len
        return json_response(
            {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": texts}
        )

    def _texts(self, ids: Sequence[int]) -> list[str]:
        decode = self._client.tokenizer().decode
        return [decode([token], skip_special_tokens=False) for token in ids]

    async def _ids(self, request: TokenizeRequest, num_bytes: int) -> Sequence[int]:
        if (request.prompt is None) == (request.messages is None):
            raise MalformedRequest("expected either prompt or messages", parameter="prompt")
        tokenizer = self._client.tokenizer()
        if request.prompt is None:
            chat = await off_loop(num_bytes, lambda: read_chat(request, read_tools(request.tools)))
            return await self._chats.token_ids(ChatRequest(chat=chat))
        set_for_chat = sorted(
            request.model_fields_set & set(TemplateFields.model_fields) - {"add_special_tokens"}
        )
        if set_for_chat:
            raise MalformedRequest(
                f"{set_for_chat[0]} needs messages instead of prompt", parameter=set_for_chat[0]
            )
        text = request.prompt
        adds = request.add_special_tokens is not False

        def encode() -> list[int]:
            self._limit.check(text)
            return tokenizer.encode(text, add_special_tokens=adds)

        return await off_loop(num_bytes, encode)

    async def _detokenize(self, http: Request) -> Response:
        """Returns the text of token ids. Special tokens are included."""
        body = await http.body()

        def decode() -> tuple[DetokenizeRequest, str]:
            request = parse_body(body, DetokenizeRequest)
            return request, self._client.tokenizer().decode(
                request.tokens, skip_special_tokens=False
            )

        request, text = await off_loop(len(body), decode)
        await served_model(self._client, request.model)
        return json_response({"prompt": text})


class TokenizerInfoApi:
    """GET /tokenizer_info. It is a separate api, because not every operator wants to publish it."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._client = setup.client

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/tokenizer_info", self._tokenizer_info, methods=["GET"])]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _tokenizer_info(self, http: Request) -> Response:
        """The tokenizer's class, size and special tokens, under the names that a
        tokenizer_config.json uses."""
        tokenizer = self._client.tokenizer()
        vocabulary = tokenizer.vocabulary()

        def text(token: int | None) -> str | None:
            return None if token is None else tokenizer.decode([token], skip_special_tokens=False)

        special = {
            str(token): {"content": text(token), "special": True}
            for token in sorted(vocabulary.special_token_ids)
        }
        return json_response(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": vocabulary.size,
                "model_max_length": self._client.models()[0].max_model_len,
                "bos_token": text(vocabulary.bos_token_id),
                "eos_token": text(next(iter(vocabulary.eos_token_ids), None)),
                "added_tokens_decoder": special,
            }
        )
