"""The api `anthropic`: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.errors import PegboardError, UnknownModel
from pegboard.interfaces.api import ApiSetup, Parsing, Prompt, RequestOptions
from pegboard.interfaces.tokenizer import Chat
from pegboard_api_anthropic.blocks import StreamEvent
from pegboard_api_anthropic.body import parse_body
from pegboard_api_anthropic.connection import EventStream, json_response, while_connected
from pegboard_api_anthropic.errors import error_body
from pegboard_api_anthropic.fields import CountTokensRequest, MessagesRequest, PromptFields
from pegboard_api_anthropic.history import read_messages
from pegboard_api_anthropic.message import Message
from pegboard_api_anthropic.tools import read_parsing, read_tools, structure, template_kwargs


class AnthropicApi:
    """Messages, whole and streamed, and how many tokens they are."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._client = setup.client
        self._settings = setup.settings

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/v1/messages", self._create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _create(self, http: Request) -> Response:
        """A message in answer to messages: whole, or with `stream` as server-sent events."""
        request = parse_body(await http.body(), MessagesRequest)
        model = self._served_model(request.model)
        token_ids, parsing = await self._prompt(request)
        params = self._client.prepare(self._params(request), parsing, token_ids)
        name = f"msg_{uuid.uuid4().hex}"
        message = Message(name, model)
        events = self._events(message, request, token_ids, params, parsing, name)
        if request.stream:  # waiting for the first output gives an error its proper status
            first = await while_connected(http.receive, _first(events))
            return EventStream(first, events)
        await while_connected(http.receive, _exhaust(events))
        return json_response(message.whole())

    async def _count_tokens(self, http: Request) -> Response:
        """How many tokens the prompt of these messages has."""
        request = parse_body(await http.body(), CountTokensRequest)
        self._served_model(request.model)
        token_ids, _ = await self._prompt(request)
        return json_response({"input_tokens": len(token_ids)})

    def _served_model(self, name: str) -> str:
        names = [model.name for model in self._client.models()]
        if name not in names:
            raise UnknownModel(f"model: {name[:200]} does not exist; this server has: {', '.join(names)}", parameter="model")
        return name

    async def _prompt(self, request: PromptFields) -> tuple[Sequence[int], Parsing]:
        """Token ids of the rendered messages, and how the answer to them is read. An assistant's message at the end is
        continued."""
        messages = read_messages(request.system, request.messages)
        tools = read_tools(request.tools)
        switches = template_kwargs(request)
        auto = bool(self._settings.get("enable_auto_tool_choice", True))
        parsing = read_parsing(request, tools, self._client, switches, auto=auto)
        is_none = request.tool_choice is not None and request.tool_choice.type == "none"
        hides_tools = is_none and self._settings.get("exclude_tools_when_tool_choice_none")
        continues = messages[-1]["role"] == "assistant"
        chat = Chat(
            messages=messages,
            tools=None if hides_tools else tools,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_kwargs=switches,
        )
        tokenizer = self._client.tokenizer()

        def render() -> Sequence[int]:
            rendered = tokenizer.render(chat)
            if rendered.token_ids is not None:
                return rendered.token_ids
            return tokenizer.encode(rendered.text or "", add_special_tokens=False)

        return await to_thread.run_sync(render), parsing

    def _params(self, request: MessagesRequest) -> SamplingParams:
        """Always read piece by piece (DELTA), so that a whole message is made of what a stream would have said."""
        values = dict(self._client.default_params())
        limits = [limit for limit in (request.max_tokens, values.pop("max_tokens", None)) if limit is not None]
        given = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": request.stop_sequences,
        }
        values.update({name: value for name, value in given.items() if value is not None})
        return SamplingParams(
            **values, max_tokens=min(limits), structured_outputs=structure(request), output_kind=RequestOutputKind.DELTA
        )

    async def _events(
        self,
        message: Message,
        request: MessagesRequest,
        token_ids: Sequence[int],
        params: SamplingParams,
        parsing: Parsing,
        name: str,
    ) -> AsyncGenerator[list[StreamEvent], None]:
        """Events as they come, those of one output together. Closing it aborts the request."""
        prompt = Prompt(token_ids=token_ids, add_special_tokens=False, cache_salt=request.cache_salt)
        outputs = self._client.generate(prompt, params, RequestOptions(request_id=name, priority=request.priority))
        async with aclosing(self._client.events(outputs, parsing)) as parsed:  # type: ignore[type-var]
            async for output in parsed:
                if any(completion.finish_reason == "error" for completion in output.outputs):
                    raise PegboardError(f"request {name} failed in the engine; the log of the server says why")
                yield message.read(output)


async def _first(events: AsyncGenerator[list[StreamEvent], None]) -> list[StreamEvent]:
    async for news in events:
        return news
    raise PegboardError("the engine ended the request without an output")


async def _exhaust(events: AsyncGenerator[list[StreamEvent], None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass
