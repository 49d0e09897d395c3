"""The proxy's routes: those of the servers, and `/servers`, which shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pegboard.errors import PegboardError, RequestError
from pegboard_command_proxy.disaggregated import PATHS, Disaggregated
from pegboard_command_proxy.forward import Answer, Call, Forwarder, passed_on
from pegboard_command_proxy.prefixes import Prompt
from pegboard_command_proxy.stored import RESPONSES, holder, stored_id
from pegboard_server.gateway import Traffic
from pegboard_server.json_api import error_body
from pegboard_server.streaming import EventStream, while_connected

FORWARDED = (
    "/v1/{rest:path}",
    "/v2/{rest:path}",
    "/inference/v1/{rest:path}",
    "/classify",
    "/detokenize",
    "/invocations",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/version",
)
"""Paths that servers get. Routes that act on one engine, such as /sleep, are asked at the server
itself."""
TEMPLATE_FIELDS = (
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "messages",
    "model",
    "tools",
)
"""Fields of a chat that decide its tokens: those of /tokenize."""


class Proxied:
    """Answers requests. disaggregated: for prompts, if prefill is separate. finds_prefixes: whether
    the choice needs the tokens of prompts. limit: of a body, in bytes."""

    def __init__(
        self,
        forwarder: Forwarder,
        disaggregated: Disaggregated | None,
        *,
        finds_prefixes: bool,
        limit: int,
    ) -> None:
        self._forwarder = forwarder
        self._disaggregated = disaggregated
        self._finds_prefixes = finds_prefixes
        self._limit = limit

    async def answer(self, request: Request, content: bytes) -> Answer:
        """content: the body. Raises PegboardError."""
        path = request.url.path
        target = f"{path}?{request.url.query}" if request.url.query else path
        call = Call(request.method, target, passed_on(request.headers), content)
        body = _object(content) if path in PATHS or path == RESPONSES else None
        if (response_id := stored_id(path, body)) is not None:
            server = await holder(self._forwarder, response_id, call.headers)
            call = replace(call, server=server)
        if body is None or path == RESPONSES:
            return await self._forwarder.send(call)
        if self._finds_prefixes:
            prompt = await self._prompt(body, call.headers)
            call = replace(call, prompt=prompt)
        if self._disaggregated is None:
            return await self._forwarder.send(call)
        return await self._disaggregated.send(call, body)

    async def content(self, request: Request) -> bytes:
        """Return the body of a request. Raises RequestError if it is too large."""
        parts = bytearray()
        async for part in request.stream():
            parts += part
            if len(parts) > self._limit:
                raise _TooLarge(
                    f"the request body is too large: at most {self._limit} bytes are allowed "
                    "(--max-body-bytes)"
                )
        return bytes(parts)

    async def _prompt(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Prompt | None:
        """Return the tokens of a prompt, which a server counts out if it is text. None: the servers
        do not say."""
        prompt = body.get("prompt")
        model = body.get("model")
        salt = body.get("cache_salt")
        if _are_tokens(prompt):
            return Prompt(prompt, model, salt)
        asked: dict[str, Any] = {"model": model, "prompt": prompt}
        if "messages" in body:
            asked = {name: body[name] for name in TEMPLATE_FIELDS if name in body}
            # a chat's default; that of /tokenize may differ
            asked.setdefault("add_generation_prompt", True)
        elif not isinstance(prompt, str):
            return None
        call = Call("POST", "/tokenize", headers, msgspec.json.encode(asked))
        try:
            answer = await self._forwarder.send(call)
            tokens = msgspec.json.decode(answer.body)["tokens"]
        except (PegboardError, msgspec.DecodeError, LookupError, TypeError):
            return None
        return Prompt(tokens, model, salt) if _are_tokens(tokens) else None


class _TooLarge(RequestError):
    status = 413


def _object(content: bytes) -> dict[str, Any] | None:
    """Return a JSON object, or None: then the server says what is wrong with the body."""
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _are_tokens(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _error(status: int, message: str, parameter: str | None = None) -> Response:
    content = msgspec.json.encode(error_body(status, message, parameter))
    headers = {"retry-after": "1"} if status == 503 else {}
    return Response(content, status, headers, "application/json")


def _error_event(status: int, message: str, parameter: str | None) -> bytes:
    body = msgspec.json.encode(error_body(status, message, parameter))
    return b"\n\ndata: " + body + b"\n\ndata: [DONE]\n\n"


class _Endpoint:
    """The ASGI application of the forwarded paths."""

    def __init__(self, proxied: Proxied, traffic: Traffic) -> None:
        self._proxied = proxied
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response: Response
        try:
            self._traffic.enter(is_public=False)
        except RequestError as error:
            await _error(error.status, str(error))(scope, receive, send)
            return
        try:
            response = await self._response(request)
            await response(scope, receive, send)
        except ClientDisconnect:
            pass  # nobody waits for the answer
        finally:
            self._traffic.leave()

    async def _response(self, request: Request) -> Response:
        try:
            content = await self._proxied.content(request)
            answering = self._proxied.answer(request, content)
            answer = await while_connected(request.receive, answering)
        except PegboardError as error:
            return _error(getattr(error, "status", 500), str(error))
        if answer.stream is None:
            return Response(answer.body, answer.status, answer.headers)
        return EventStream(answer.stream.parts(), answer.stream, _error_event)


def build_app(
    proxied: Proxied, groups: Sequence[Forwarder], traffic: Traffic, *, shows_servers: bool
) -> Starlette:
    """Build the application. groups: all servers, those that answer last; `/health` is 200 if one
    of these is healthy. shows_servers: whether `/servers` exists."""

    async def health(request: Request) -> Response:
        if any(server.is_healthy for server in groups[-1].servers):
            return Response()
        return _error(503, "no server is healthy; the log of the proxy says why")

    async def servers(request: Request) -> Response:
        shown = [
            {
                "url": server.url,
                "role": server.role,
                "is_healthy": server.is_healthy,
                "reason": server.reason,
                "running": server.running,
                "requests": server.requests,
                "failures": server.failures,
            }
            for group in groups
            for server in group.servers
        ]
        return Response(msgspec.json.encode({"servers": shown}), media_type="application/json")

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: the proxy has no route {request.method} {request.url.path}"
        return _error(error.status_code, message)

    endpoint = _Endpoint(proxied, traffic)
    return Starlette(
        routes=[
            Route("/health", health),
            Route("/ping", health, methods=["GET", "POST"]),
            *([Route("/servers", servers)] if shows_servers else []),
            *(Route(path, endpoint) for path in FORWARDED),
        ],
        exception_handlers={HTTPException: refuse},
    )
