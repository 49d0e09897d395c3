"""The api `anthropic`: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.interfaces.api import ApiSetup, RequestOptions
from pegboard.interfaces.tokenizer import Chat
from pegboard_api_anthropic.conversation import (
    read_choice,
    read_messages,
    read_tools,
    structure,
    template_kwargs,
)
from pegboard_api_anthropic.fields import (
    CountTokensRequest,
    MessagesRequest,
    PromptFields,
    parse_body,
)
from pegboard_api_anthropic.message import Message, StreamEvent
from pegboard_chat.chats import ChatRequest, Chats, ParsedOutput
from pegboard_chat.off_loop import off_loop
from pegboard_server.json_api import json_response, served_model
from pegboard_server.streaming import (
    EventStream,
    chain,
    exhaust,
    first_of,
    named_event,
    while_connected,
)


class AnthropicApi:
    """Messages, whole and streamed, and counting their tokens."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._client = setup.client
        self._chats = Chats(setup.client, setup.settings)

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/v1/messages", self._create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _create(self, http: Request) -> Response:
        """Answers a conversation with a message: whole, or with `stream` as server-sent events."""
        body = await http.body()

        def read() -> tuple[MessagesRequest, ChatRequest, SamplingParams]:
            request = parse_body(body, MessagesRequest)
            return request, _chat_request(request, request.cache_salt), self._params(request)

        request, chat, params = await off_loop(len(body), read)
        model, lora = await served_model(self._client, request.model)
        name = f"msg_{uuid.uuid4().hex}"
        options = RequestOptions(request_id=name, priority=request.priority, lora=lora)
        outputs = await self._chats.answer(chat, params, options)
        message = Message(name, model)
        events = _events(message, outputs)
        if request.stream:  # wait for the first output, so that an error gets its proper status
            first = await while_connected(http.receive, first_of(events))
            return EventStream(_encoded(chain(first, events)), events, _error_event)
        await while_connected(http.receive, exhaust(events))
        return json_response(message.whole())

    async def _count_tokens(self, http: Request) -> Response:
        """How many tokens the prompt of these messages has."""
        body = await http.body()

        def read() -> tuple[CountTokensRequest, ChatRequest]:
            request = parse_body(body, CountTokensRequest)
            return request, _chat_request(request)

        request, chat = await off_loop(len(body), read)
        await served_model(self._client, request.model)
        token_ids = await self._chats.token_ids(chat)
        return json_response({"input_tokens": len(token_ids)})

    def _params(self, request: MessagesRequest) -> SamplingParams:
        """The sampling parameters. The output is always read in pieces (DELTA), so that a whole
        message is the sum of its stream."""
        values = dict(self._client.default_params())
        limits = [
            limit
            for limit in (request.max_tokens, values.pop("max_tokens", None))
            if limit is not None
        ]
        given = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": request.stop_sequences,
        }
        values.update({name: value for name, value in given.items() if value is not None})
        return SamplingParams(
            **values,
            max_tokens=min(limits),
            structured_outputs=structure(request),
            output_kind=RequestOutputKind.DELTA,
        )


def _chat_request(request: PromptFields, cache_salt: str | None = None) -> ChatRequest:
    """The conversation. An assistant's message at the end is continued."""
    messages = read_messages(request.system, request.messages)
    continues = messages[-1]["role"] == "assistant"
    chat = Chat(
        messages=messages,
        tools=read_tools(request.tools),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_kwargs=template_kwargs(request),
    )
    choice, name = read_choice(request.tool_choice)
    is_parallel = request.tool_choice is None or not request.tool_choice.disable_parallel_tool_use
    return ChatRequest(
        chat=chat,
        tool_choice=choice,
        function=name,
        parallel_tool_calls=is_parallel,
        cache_salt=cache_salt,
    )


async def _events(
    message: Message, outputs: AsyncGenerator[ParsedOutput, None]
) -> AsyncGenerator[list[StreamEvent], None]:
    """Yields the events of each output together. Closing it aborts the request."""
    async with aclosing(outputs):
        async for output in outputs:
            yield message.read(output)


async def _encoded(events: AsyncGenerator[list[StreamEvent], None]) -> AsyncGenerator[bytes, None]:
    async for news in events:
        if news:
            yield b"".join(map(named_event, news))


def _error_event(status: int, message: str, parameter: str | None) -> bytes:
    return named_event(error_body(status, message))


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(status: int, message: str, parameter: str | None = None) -> dict[str, Any]:
    """The body of an error, also used for the event `error` in a stream. The message names the
    parameter."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if parameter is not None and parameter not in message:
        message = f"{parameter}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}
