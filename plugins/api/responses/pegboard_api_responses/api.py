"""The api `responses`: POST /v1/responses, and the routes for stored responses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import MalformedRequest, PegboardError, RequestError
from pegboard.interfaces.api import ApiSetup
from pegboard.interfaces.tokenizer import Chat
from pegboard.log import get_logger
from pegboard_api_responses.fields import InputTokensRequest, PromptFields, ResponsesRequest
from pegboard_api_responses.history import conversation, is_unfinished, read_input
from pegboard_api_responses.items import Items
from pegboard_api_responses.listing import input_items, page
from pegboard_api_responses.open_items import StreamEvent
from pegboard_api_responses.options import ResponsesOptions
from pegboard_api_responses.request import chat_request, response_params
from pegboard_api_responses.response import ResponseAnswer
from pegboard_api_responses.store import EventEncoder, EventLog, ResponseStore, Stored
from pegboard_api_responses.tools import Tools, read_tools
from pegboard_api_responses.turns import Plan, Turns
from pegboard_chat.chats import ChatRequest, Chats
from pegboard_chat.off_loop import off_loop
from pegboard_chat.openai_format import TokenNames, template_kwargs
from pegboard_chat.request_body import parse_body
from pegboard_server.json_api import (
    endpoint,
    error_body,
    error_event,
    in_pieces,
    json_response,
    served_model,
)
from pegboard_server.streaming import EventStream, closed_on_error, exhaust, while_connected

log = get_logger(__name__)


class ResponsesApi:
    """Creates (whole, streamed, in the background), retrieves, cancels and deletes responses."""

    def __init__(self, options: ResponsesOptions, setup: ApiSetup) -> None:
        self._client = setup.client
        self._chats = Chats(setup.client, setup.settings)
        self._options = options
        self._builtin_tools = setup.builtin_tools
        self._modules = setup.modules
        # the next request may reach another API process
        is_alone = int(setup.settings.get("api_server_count") or 1) == 1
        self._store = ResponseStore(options, is_on=is_alone)

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/v1/responses", endpoint(self._create, ResponsesRequest), methods=["POST"]),
            Route(
                "/v1/responses/input_tokens",
                endpoint(self._count_tokens, InputTokensRequest),
                methods=["POST"],
            ),
            Route("/v1/responses/{id}", self._retrieve, methods=["GET"]),
            Route("/v1/responses/{id}/input_items", self._list_input, methods=["GET"]),
            Route("/v1/responses/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self._cancel, methods=["POST"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _create(self, http: Request) -> Response:
        """A response to `input`: whole, with `stream` as server-sent events, or with `background`
        written later."""
        body = await http.body()

        def read() -> tuple[ResponsesRequest, SamplingParams, list[dict[str, Any]]]:
            request = parse_body(body, ResponsesRequest)
            self._check(request)
            return (
                request,
                response_params(request, self._client.default_params()),
                input_items(request.input),
            )

        request, params, items = await off_loop(len(body), read)
        turns = await self._start(request, params, items, len(body))
        if request.background:
            kept = EventLog() if request.stream else None
            self._in_background(turns, request, kept)
            return (
                await _whole(turns) if kept is None else EventStream(kept.read(), None, error_event)
            )
        async with closed_on_error(turns):
            await while_connected(http.receive, turns.wait())
        events = self._events(turns, request)
        if request.stream:
            return EventStream(_encoded(events, turns), turns, error_event)
        await while_connected(http.receive, exhaust(events))
        return await _whole(turns)

    def _check(self, request: ResponsesRequest) -> None:
        if request.background and not (request.store and self._store.is_on):
            why = "store must be true" if self._store.is_on else "this server keeps no responses"
            raise RequestError(
                f"background needs a response that is kept: {why}", parameter="background"
            )
        if request.stream_options is not None and not request.stream:
            raise MalformedRequest("stream_options needs stream: true", parameter="stream_options")

    def _before(self, request: PromptFields) -> Stored:
        """Returns the response `previous_response_id`, or one without messages."""
        if request.previous_response_id is None:
            return Stored({})
        stored = self._store.get(request.previous_response_id, "previous_response_id")
        if stored.task is not None:
            raise RequestError(
                "the previous response is still being written", parameter="previous_response_id"
            )
        return stored

    async def _chat(
        self,
        request: PromptFields,
        tools: Tools,
        before: Stored,
        num_bytes: int,
        cache_salt: str | None,
    ) -> tuple[ChatRequest, list[dict[str, Any]]]:
        """Returns the request of the first turn, and the conversation before the response, without
        instructions."""

        def read() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
            messages = [*before.messages, *read_input(request.input, [*tools.builtin.values()])]
            return messages, conversation(request.instructions, (), messages)

        messages, whole = await off_loop(num_bytes, read)
        effort = request.reasoning.effort if request.reasoning else None
        continues = is_unfinished(request.input)
        chat = Chat(
            messages=whole,
            tools=tools.shapes or None,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_kwargs=template_kwargs(request.chat_template_kwargs, effort),
        )
        return chat_request(request, chat, tools, self._chats, cache_salt), messages

    async def _count_tokens(self, http: Request) -> Response:
        """How many tokens the prompt of this request has."""
        body = await http.body()
        request = await off_loop(len(body), lambda: parse_body(body, InputTokensRequest))
        await served_model(self._client, request.model)
        tools = read_tools(request.tools, self._builtin_tools, self._options, "")
        try:
            chat, _ = await self._chat(request, tools, self._before(request), len(body), None)
            token_ids = await self._chats.token_ids(chat)
        finally:
            await tools.close()
        return json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def _start(
        self,
        request: ResponsesRequest,
        params: SamplingParams,
        given: list[dict[str, Any]],
        num_bytes: int,
    ) -> Turns:
        """Start to generate. given: the items of the request, as they are listed. num_bytes: the
        size of its body."""
        client = self._client
        model, lora = await served_model(client, request.model)
        name = request.request_id or f"resp_{uuid.uuid4().hex}"
        tools = read_tools(request.tools, self._builtin_tools, self._options, name, self._modules)
        before = self._before(request)
        chat_asked, messages = await self._chat(
            request, tools, before, num_bytes, request.cache_salt
        )
        token_bytes = (
            client.tokenizer().vocabulary().token_bytes if params.logprobs is not None else ()
        )
        most = self._options.max_tool_calls
        items = Items(
            with_reasoning=request.include_reasoning,
            builtin=tools.callable_names(),
            max_builtin=most
            if request.max_tool_calls is None
            else min(most, request.max_tool_calls),
        )
        names = TokenNames(as_ids=False, token_bytes=token_bytes)
        answer = ResponseAnswer(request, name, model, params, bool(chat_asked.tools), names, items)
        listed = [*before.input_items, *before.response.get("output", ()), *given]
        plan = Plan(self._chats, request, messages, tools, num_bytes + before.num_bytes, lora)
        turns = Turns(plan, answer, params, chat_asked, listed)
        async with closed_on_error(turns):
            await turns.start()
        return turns

    async def _events(
        self, turns: Turns, request: ResponsesRequest
    ) -> AsyncGenerator[list[StreamEvent], None]:
        """Yields events as they arrive. Stores the response when it has ended."""
        async with aclosing(turns.events()) as events:
            async for news in events:
                yield news
        # the background task stores its response itself
        if request.store and self._store.is_on and not request.background:
            await self._keep(turns)

    async def _keep(self, turns: Turns, events: EventLog | None = None) -> None:
        """Store a response that has ended."""
        stored = Stored(
            turns.answer.whole(), turns.conversation(), events=events, input_items=turns.input_items
        )
        parts = [stored.response, stored.messages, stored.input_items]
        num_bytes = await off_loop(turns.num_bytes, lambda: len(in_pieces(parts)))
        self._store.put(stored, num_bytes + (events.num_bytes if events is not None else 0))

    def _in_background(
        self, turns: Turns, request: ResponsesRequest, events: EventLog | None
    ) -> None:
        """Write the response in a background task, which adds its events to `events`. It can be
        retrieved from now on."""
        answer = turns.answer

        async def write() -> None:
            try:
                async with aclosing(turns), aclosing(self._events(turns, request)) as news:
                    async for more in news:
                        if events is not None:
                            await events.add(more, turns.num_bytes)
            except asyncio.CancelledError:
                answer.cancel()
                raise
            except Exception as error:  # the task ends here; without this, the error would be lost
                log.error(
                    "response %s failed: %s",
                    answer.name,
                    error,
                    exc_info=not isinstance(error, PegboardError),
                )
                answer.fail(error)
            finally:
                await self._keep(turns, events)
                if events is not None:
                    events.end()

        stored = Stored(
            answer.whole(),
            [],
            asyncio.create_task(write()),
            answer.whole,
            events,
            input_items=turns.input_items,
        )
        self._store.put(stored, turns.num_bytes)

    async def _retrieve(self, http: Request) -> Response:
        """A stored response. With `stream=true`, its events after number `starting_after`."""
        is_stream, after = read_query(http)
        stored = self._store.get(http.path_params["id"], "response_id")
        if not is_stream:
            return Response(
                await off_loop(stored.num_bytes, lambda: in_pieces(stored.now())),
                media_type="application/json",
            )
        if stored.events is None:
            raise RequestError(
                (
                    "only a response that was made with background: true and stream: true can be "
                    "streamed again"
                ),
                parameter="stream",
            )
        return EventStream(stored.events.read(after), None, error_event)

    async def _list_input(self, http: Request) -> Response:
        """The input items of a stored response, with those of the responses before it."""
        stored = self._store.get(http.path_params["id"], "response_id")
        return json_response(page(stored.input_items, http.query_params.multi_items()))

    async def _cancel(self, http: Request) -> Response:
        """Stop writing a background response."""
        stored = self._store.get(http.path_params["id"], "response_id")
        if not stored.response["background"]:
            raise RequestError(
                "only a response with background: true can be cancelled", parameter="response_id"
            )
        if stored.task is not None:
            stored.task.cancel()
            await asyncio.gather(stored.task, return_exceptions=True)
        return json_response(self._store.get(http.path_params["id"], "response_id").now())

    async def _delete(self, http: Request) -> Response:
        """Delete a response. A response that is still being written is cancelled."""
        name = http.path_params["id"]
        stored = self._store.get(name, "response_id")
        if stored.task is not None:
            stored.task.cancel()
            await asyncio.gather(stored.task, return_exceptions=True)
        self._store.delete(name)
        return json_response({"id": name, "object": "response", "deleted": True})


async def _encoded(
    events: AsyncGenerator[list[StreamEvent], None], turns: Turns
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events. Those of one output are sent together."""
    encoder = EventEncoder()
    async with aclosing(events):
        async for news in events:
            if news:
                yield b"".join(await encoder.encode(news, turns.num_bytes))


async def _whole(turns: Turns) -> Response:
    """The response as one object."""
    response = turns.answer.whole()
    return Response(
        await off_loop(turns.num_bytes, lambda: in_pieces(response)), media_type="application/json"
    )


STREAM = "stream"
AFTER = "starting_after"
OBFUSCATION = "include_obfuscation"
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def read_query(http: Request) -> tuple[bool, int]:
    """Returns whether to stream, and the number of the event to start after (-1: start from the
    first event). Raises RequestError."""
    given = dict(http.query_params.multi_items())
    unknown = next((name for name in given if name not in (STREAM, AFTER, OBFUSCATION)), None)
    if unknown is not None:
        raise RequestError(
            f"unknown query parameter {unknown[:60]!r}; expected {STREAM} or {AFTER}",
            parameter=unknown[:60],
        )
    if _flag(given, OBFUSCATION):
        raise RequestError(
            f"{OBFUSCATION} is not supported: deltas are never padded", parameter=OBFUSCATION
        )
    is_stream = _flag(given, STREAM)
    after = given.get(AFTER)
    if after is None:
        return is_stream, -1
    if not is_stream:
        raise RequestError(f"{AFTER} needs {STREAM}=true", parameter=AFTER)
    if not (after.isascii() and after.isdigit() and len(after) <= 18):
        raise RequestError(
            f"{AFTER}: expected the number of an event, got {after[:60]!r}", parameter=AFTER
        )
    return is_stream, int(after)


def _flag(given: dict[str, str], name: str) -> bool:
    value = given.get(name, "false")
    if value not in _FLAGS:
        raise RequestError(
            f"{name}: expected {' or '.join(_FLAGS)}, got {value[:60]!r}", parameter=name
        )
    return _FLAGS[value]
