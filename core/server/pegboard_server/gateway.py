"""One Starlette application of all enabled apis. It knows no route: apis bring their own.

What they share happens in `Gateway`, in plain ASGI: the request id, the API key, the checks of a body before it is read, and
turning exceptions into the api family's error body.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, get_route_path  # type: ignore[attr-defined]
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pegboard import env
from pegboard.config.schema import ServerConfig
from pegboard.errors import EngineDeadError, Overloaded, PegboardError, RequestError
from pegboard.interfaces.api import TRACE_HEADERS, Api, ApiSpec, EngineClient
from pegboard.interfaces.metrics import Sample
from pegboard.log import get_logger
from pegboard_server.measured_app import MeasuredApp
from pegboard_server.middleware import outer_middleware
from pegboard_server.refusals import BodyTooLarge, HeadTooLarge, Unauthorized, refuse_body
from pegboard_server.traffic import Stopping, Traffic

log = get_logger(__name__)

BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
TRACED = ("traceparent", "tracestate")
REQUEST_ID = re.compile(r"[!-~]{1,256}")


@dataclass(frozen=True, slots=True)
class MountedApi:
    """An enabled api and the routes it brought."""

    name: str
    api: Api
    spec: ApiSpec
    routes: tuple[BaseRoute, ...]


def build_app(
    apis: Sequence[tuple[str, Api, ApiSpec]],
    client: EngineClient,
    config: ServerConfig,
    traffic: Traffic | None = None,
    publish: Callable[[Sample], None] | None = None,
) -> Starlette:
    """One application of all `apis` (name, implementation, spec), first match wins. Paths that belong to none of them
    answer in the error body of the first api. traffic: also given to `run_server`, which then drains it before it stops. publish:
    takes a sample of `HTTP_METRICS` per request."""
    mounted = [MountedApi(name, api, spec, tuple(api.routes())) for name, api, spec in apis]
    traffic = traffic or Traffic(config.max_running_requests)
    gateway = Middleware(Gateway, mounted=mounted, client=client, config=config, traffic=traffic)
    routes = [route for entry in mounted for route in entry.routes]
    middleware = [*outer_middleware(config), gateway]
    if publish is not None:
        unmeasured = frozenset(path for entry in mounted for path in entry.spec.unmeasured_paths)
        middleware.insert(0, Middleware(MeasuredApp, routes=routes, unmeasured=unmeasured, publish=publish))
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _refuse(mounted)})


def _owner(mounted: Sequence[MountedApi], scope: Scope) -> MountedApi | None:
    """The api whose route the path is, whatever the method; else the first, if there is any."""
    for entry in mounted:
        if any(route.matches(scope)[0] is not Match.NONE for route in entry.routes):
            return entry
    return mounted[0] if mounted else None


def _error_response(
    owner: MountedApi | None, status: int, message: str, parameter: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    body = owner.api.error_body(status, message, parameter) if owner else {"error": {"message": message, "code": status}}
    return JSONResponse(body, status, headers)


def _refuse(mounted: Sequence[MountedApi]) -> Any:
    """Handler of Starlette's own refusals: no such path, no such method."""

    async def refuse(request: Request, error: HTTPException) -> Response:
        path = get_route_path(request.scope)
        headers = dict(error.headers or {})
        message = str(error.detail)
        if error.status_code == 404:
            message = f"Not Found: there is no route {request.method} {path}"
        elif error.status_code == 405:
            message = f"Method Not Allowed: {request.method} {path}; allowed: {headers.get('Allow', 'see the documentation')}"
        return _error_response(_owner(mounted, request.scope), error.status_code, message, None, headers)

    return refuse


class Gateway:
    """What every request passes on its way in, and every error on its way out."""

    def __init__(
        self, app: ASGIApp, *, mounted: Sequence[MountedApi], client: EngineClient, config: ServerConfig, traffic: Traffic
    ) -> None:
        self.app = app
        self._traffic = traffic
        self._mounted = mounted
        self._client = client
        self._public = frozenset(path for entry in mounted for path in entry.spec.public_paths)
        keys = config.api_key if config.api_key is not None else [key for key in [env.api_key()] if key]
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._max_body_bytes = config.max_body_bytes
        self._max_headers = config.h11_max_header_count
        self._max_head_bytes = config.h11_max_incomplete_event_size
        self._send_request_id = config.enable_request_id_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._traffic.enter(is_public=get_route_path(scope) in self._public)
        except RequestError as error:
            await self._answer(error, scope, "")(scope, receive, send)
            return
        try:
            await self._pass(scope, receive, send)
        finally:
            self._traffic.leave()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        request_id = uuid.uuid4().hex
        started = False

        async def send_back(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._send_request_id:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check_head(scope["headers"])
            headers = dict(scope["headers"])
            request_id = _request_id(headers) or request_id
            if b"traceparent" in headers:
                TRACE_HEADERS.set({name: headers[name.encode()].decode("latin-1") for name in TRACED if name.encode() in headers})
            scope.setdefault("state", {})["request_id"] = request_id
            self._check(scope, headers)
            await self.app(scope, self._limited(receive), send_back)
        except ClientDisconnect:
            log.debug("request %s: the client left", request_id)
        except asyncio.CancelledError:  # only the server cancels, at the end of the shutdown timeout; the answer stays incomplete
            log.warning("request %s was cut off: the server is stopping", request_id)
            if not started:
                await self._answer(Stopping("the server is stopping"), scope, request_id)(scope, receive, send_back)
        except Exception as error:  # the boundary to the api plugins: whatever comes out becomes an answer
            if started:  # too late for an error body; the broken connection tells the client
                log.exception("request %s failed after its answer had begun", request_id)
                raise
            response = self._answer(error, scope, request_id)
            if isinstance(error, BodyTooLarge):
                await refuse_body(response, receive, send_back)
            else:
                await response(scope, receive, send_back)

    def _check_head(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """The parser limits only a head that arrives in pieces."""
        if len(headers) > self._max_headers:
            raise HeadTooLarge(f"the request has {len(headers)} headers, at most {self._max_headers} are allowed")
        if sum(len(name) + len(value) for name, value in headers) > self._max_head_bytes:
            raise HeadTooLarge(f"the request's headers are over {self._max_head_bytes} bytes (h11_max_incomplete_event_size)")

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse before anything is read: no key, a dead engine, a body of the wrong type or size."""
        method, path = scope["method"], get_route_path(scope)
        if path in self._public or method == "OPTIONS":
            return
        if self._key_digests and not self._has_key(headers):
            raise Unauthorized("Unauthorized: send one of the server's API keys as 'Authorization: Bearer <key>' or 'x-api-key'")
        health = self._client.health()
        if not health.is_alive:
            raise EngineDeadError(f"the engine has died: {health.reason or 'see the log of the server'}")
        length = headers.get(b"content-length", b"0")
        if method in BODY_METHODS and (length != b"0" or b"transfer-encoding" in headers):
            self._check_content_type(scope, headers)
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise self._too_large(f"{int(length)} bytes")

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        """As a bearer token, or in the header x-api-key. Compares digests, all of them, so that time tells nothing about the
        keys."""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = [key.strip()] if scheme.lower() == b"bearer" else []
        given += [headers[b"x-api-key"].strip()] if b"x-api-key" in headers else []
        digests = [hashlib.sha256(text).digest() for text in given]
        found = [secrets.compare_digest(digest, known) for digest in digests for known in self._key_digests]
        return any(found)

    def _check_content_type(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        owner = _owner(self._mounted, scope)
        allowed = owner.spec.content_types if owner else ()
        given = headers.get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
        if given not in allowed:
            names = " or ".join(repr(name) for name in allowed)
            raise RequestError(f"Unsupported Media Type: Only {names} is allowed, got {given or 'no Content-Type'!r}")

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that stops reading once the body is over the limit (a length may be missing or wrong)."""
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise self._too_large(f"more than {self._max_body_bytes} bytes")
            return message

        return limited

    def _too_large(self, got: str) -> BodyTooLarge:
        return BodyTooLarge(f"the request body is too large: {got}, at most {self._max_body_bytes} are allowed (max_body_bytes)")

    def _answer(self, error: Exception, scope: Scope, request_id: str) -> Response:
        """The error body for `error`; what the user did not cause is logged."""
        owner = _owner(self._mounted, scope)
        headers: dict[str, str] = {}
        parameter = None
        if isinstance(error, RequestError):
            status, message, parameter = error.status, str(error), error.parameter
            if isinstance(error, Overloaded):
                headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
            if isinstance(error, BodyTooLarge):
                headers["Connection"] = "close"
            if isinstance(error, Stopping):
                headers |= {"Retry-After": "1", "Connection": "close"}
            if isinstance(error, Unauthorized):
                headers["WWW-Authenticate"] = "Bearer"
        elif isinstance(error, PegboardError):
            status, message = 500, str(error)
            log.error("request %s failed: %s", request_id, error, exc_info=error.__cause__)
        else:
            status = 500
            where = f"the plugin api:{owner.name}" if owner else "the server"
            message = f"{where} failed with {type(error).__name__}; the log of the server has request {request_id}"
            log.error("request %s: %s failed", request_id, where, exc_info=error)
        return _error_response(owner, status, message, parameter, headers)


def _request_id(headers: dict[bytes, bytes]) -> str | None:
    given = headers.get(b"x-request-id")
    if given is None:
        return None
    text = given.decode("latin-1")
    if not REQUEST_ID.fullmatch(text):
        raise RequestError("X-Request-Id must be 1 to 256 visible ASCII characters", parameter="X-Request-Id")
    return text
