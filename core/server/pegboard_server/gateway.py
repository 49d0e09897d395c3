"""Every request passes the gateway on its way in, and every error on its way out, whichever API it
belongs to.

It is plain ASGI. It counts the requests in work, sets the request id, checks the API key, checks
the body before reading it, and turns exceptions into the API family's error body. It does not know
any route.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import re
import secrets
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, get_route_path  # type: ignore[attr-defined]
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pegboard import env
from pegboard.errors import (
    EngineDeadError,
    Overloaded,
    PegboardError,
    PluginFailure,
    RequestError,
    blamed,
    culprit,
)
from pegboard.interfaces.api import (
    CLIENT,
    DATA_PARALLEL_RANK,
    TRACE_HEADERS,
    Api,
    ApiSpec,
    EngineClient,
)
from pegboard.log import get_logger
from pegboard_server.connections import SlowRequest, timed
from pegboard_server.json_api import shortened
from pegboard_server.logs import ERROR
from pegboard_server.memory import FreedMemory
from pegboard_server.settings import ServerConfig
from pegboard_server.streaming import Stopping

log = get_logger(__name__)

BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
TRACED = ("traceparent", "tracestate")
REQUEST_ID = re.compile(r"[!-~]{1,256}")

LINGER_S = 2.0
LINGER_BYTES = 16 * 1024 * 1024
"""Of a refused body, at most this many bytes are read, for at most this many seconds."""


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401


class BodyTooLarge(RequestError):
    """The request body is larger than `max_body_bytes`, or `max_upload_bytes`."""

    status = 413


class HeadTooLarge(RequestError):
    """The request has more than `h11_max_header_count` headers, or more than
    `h11_max_incomplete_event_size` bytes of them."""

    status = 431


class Traffic:
    """The requests in work. The gateway counts them, and the server uses the count when it stops.
    Used on one event loop.

    max_running is the limit of requests in work at once. More are refused, so that a flood of
    requests does not fill the memory.
    """

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self.num_running = 0
        self.is_stopping = False
        self._change = asyncio.Event()

    def enter(self, *, is_public: bool) -> None:
        """Count a request in. Public paths (health checks) are exempt from the limit, but not from
        stopping: a 503 tells the health check that the server stops. Raises Stopping,
        Overloaded."""
        if self.is_stopping:
            raise Stopping("the server is stopping and takes no new requests")
        if self.num_running >= self.max_running and not is_public:
            raise Overloaded(
                f"{self.num_running} requests are in work, the most this server takes "
                "(max_running_requests)"
            )
        self.num_running += 1

    def leave(self) -> None:
        """Count a request out."""
        self.num_running -= 1
        self._change.set()

    def stop(self) -> None:
        """Refuse all requests from now on."""
        self.is_stopping = True
        self._change.set()

    async def wait_until_idle(self) -> None:
        """Wait until no request is in work."""
        while self.num_running:
            self._change.clear()
            await self._change.wait()


@dataclass(frozen=True, slots=True)
class MountedApi:
    """An enabled api and its routes."""

    name: str
    api: Api
    spec: ApiSpec
    routes: tuple[BaseRoute, ...]


def owner_of(mounted: Sequence[MountedApi], scope: Scope) -> MountedApi | None:
    """The api that has a route for the path, whatever the method, otherwise the first api. None: no
    api is mounted."""
    for entry in mounted:
        if any(route.matches(scope)[0] is not Match.NONE for route in entry.routes):
            return entry
    return mounted[0] if mounted else None


def error_response(
    owner: MountedApi | None,
    status: int,
    message: str,
    parameter: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    message, parameter = shortened(message, parameter)
    body = (
        owner.api.error_body(status, message, parameter)
        if owner
        else {"error": {"message": message, "code": status}}
    )
    return JSONResponse(body, status, headers)


class Gateway:
    """The ASGI middleware that every request and every error passes. modules: module → plugin, to
    name the plugin that failed."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        mounted: Sequence[MountedApi],
        client: EngineClient,
        config: ServerConfig,
        traffic: Traffic,
        modules: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.app = app
        self._modules = modules
        self._traffic = traffic
        self._mounted = mounted
        self._client = client
        self._public = frozenset(path for entry in mounted for path in entry.spec.public_paths)
        keys = (
            config.api_key
            if config.api_key is not None
            else [key for key in [env.api_key()] if key]
        )
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._max_body_bytes = {
            "max_body_bytes": config.max_body_bytes,
            "max_upload_bytes": config.max_upload_bytes,
        }
        self._max_headers = config.h11_max_header_count
        self._max_head_bytes = config.h11_max_incomplete_event_size
        self._send_request_id = config.enable_request_id_headers
        self._freed = FreedMemory()
        self._log_error_stack = config.log_error_stack

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
            self._freed.add(scope.get("state", {}).get("num_body_bytes", 0))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        request_id = uuid.uuid4().hex
        started = False

        async def send_back(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._send_request_id:
                    message["headers"] = [
                        *message.get("headers", ()),
                        (b"x-request-id", request_id.encode()),
                    ]
            await send(message)

        try:
            self._check_head(scope["headers"])
            headers = dict(scope["headers"])
            request_id = _request_id(headers) or request_id
            if b"traceparent" in headers:
                TRACE_HEADERS.set(
                    {
                        name: headers[name.encode()].decode("latin-1")
                        for name in TRACED
                        if name.encode() in headers
                    }
                )
            if (rank := headers.get(b"x-data-parallel-rank")) is not None:
                DATA_PARALLEL_RANK.set(_rank(rank.decode("latin-1")))
            scope.setdefault("state", {})["request_id"] = request_id
            self._check(scope, headers)
            await self.app(
                scope, self._limited(receive, scope["state"], self._limit_of(scope)), send_back
            )
            # kept, it would be a cycle with the request and its body
            answered = scope["state"].pop(ERROR, None)
            if answered is not None:
                self._log_refused(answered, request_id)
        except ClientDisconnect:
            log.debug("request %s: the client disconnected", request_id)
        except asyncio.CancelledError:
            # only the server cancels, at the end of the shutdown timeout; the answer stays
            # incomplete
            log.warning("request %s was cut off: the server is stopping", request_id)
            if not started:
                await self._answer(Stopping("the server is stopping"), scope, request_id)(
                    scope, receive, send_back
                )
        except Exception as error:
            # the boundary to the api plugins: every exception becomes a response
            if started:  # too late for an error body; the broken connection tells the client
                log.exception("request %s failed after its answer had begun", request_id)
                raise
            response = self._answer(error, scope, request_id)
            if isinstance(error, BodyTooLarge):
                await refuse_body(response, receive, send_back)
            else:
                await response(scope, receive, send_back)

    def _check_head(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Check the number and size of the headers. The HTTP parser only limits a head that arrives
        in several pieces."""
        if len(headers) > self._max_headers:
            raise HeadTooLarge(
                f"the request has {len(headers)} headers, at most {self._max_headers} are allowed"
            )
        if sum(len(name) + len(value) for name, value in headers) > self._max_head_bytes:
            raise HeadTooLarge(
                f"the request's headers are over {self._max_head_bytes} bytes "
                "(h11_max_incomplete_event_size)"
            )

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse a request before its body is read: no key, a dead engine, a body of the wrong type
        or size."""
        method = scope["method"]
        path = get_route_path(scope)
        if path in self._public or method == "OPTIONS":
            return
        key = self._key(headers)
        if self._key_digests and key is None:
            raise Unauthorized(
                "Unauthorized: send one of the server's API keys as 'Authorization: Bearer <key>' "
                "or 'x-api-key'"
            )
        host, _ = scope.get("client") or ("", 0)
        CLIENT.set(f"{host} {key}")
        health = self._client.health()
        if health.is_stalled:
            raise Overloaded(f"the engine does not answer: {health.reason}", retry_after_s=10.0)
        if not health.is_alive:
            raise EngineDeadError(
                f"the engine has died: {health.reason or 'see the log of the server'}"
            )
        length = headers.get(b"content-length", b"0")
        if method in BODY_METHODS and (length != b"0" or b"transfer-encoding" in headers):
            self._check_content_type(scope, headers)
        setting = self._limit_of(scope)
        if length.isdigit() and int(length) > self._max_body_bytes[setting]:
            raise self._too_large(f"{int(length)} bytes", setting)

    def _key(self, headers: dict[bytes, bytes]) -> int | None:
        """Return which of the server's keys was given, as a bearer token or in the header
        x-api-key. Compares the digests of all keys, so that the time taken tells nothing about
        them."""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = [key.strip()] if scheme.lower() == b"bearer" else []
        given += [headers[b"x-api-key"].strip()] if b"x-api-key" in headers else []
        digests = [hashlib.sha256(text).digest() for text in given]
        matches = [
            [secrets.compare_digest(digest, known) for digest in digests]
            for known in self._key_digests
        ]
        return next((number for number, equal in enumerate(matches) if any(equal)), None)

    def _check_content_type(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        owner = owner_of(self._mounted, scope)
        allowed = owner.spec.content_types if owner else ()
        given = headers.get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
        if given not in allowed:
            names = " or ".join(repr(name) for name in allowed)
            raise RequestError(
                f"Unsupported Media Type: Only {names} is allowed, got "
                f"{given or 'no Content-Type'!r}"
            )

    def _limit_of(self, scope: Scope) -> str:
        """Return the setting that limits the body."""
        owner = owner_of(self._mounted, scope)
        uploads = owner is not None and "uploads" in owner.spec.flags
        return "max_upload_bytes" if uploads else "max_body_bytes"

    def _limited(self, receive: Receive, state: dict[str, Any], setting: str) -> Receive:
        """Wrap `receive` so that it raises BodyTooLarge once the body is over the limit.
        Content-Length may be missing or wrong. The size of the body is kept in the request's
        state."""
        num_bytes = 0
        most = self._max_body_bytes[setting]
        receive = timed(receive)

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                state["num_body_bytes"] = num_bytes
                if num_bytes > most:
                    raise self._too_large(f"more than {most} bytes", setting)
            return message

        return limited

    def _too_large(self, got: str, setting: str) -> BodyTooLarge:
        return BodyTooLarge(
            f"the request body is too large: {got}, at most {self._max_body_bytes[setting]} are "
            f"allowed ({setting})"
        )

    def _log_refused(self, error: BaseException, request_id: str) -> None:
        """Log one line about a request that was refused, or a warning with the traceback if the
        settings ask for it."""
        if self._log_error_stack:
            log.warning("request %s was refused", request_id, exc_info=error)
        else:
            log.info(
                "request %s was refused: %s",
                request_id,
                " ".join(shortened(str(error), None)[0].split()),
            )

    def _answer(self, error: Exception, scope: Scope, request_id: str) -> Response:
        """Returns the response with the error body for `error`. Logs errors that the user did not
        cause."""
        owner = owner_of(self._mounted, scope)
        headers: dict[str, str] = {}
        parameter = None
        if isinstance(error, PluginFailure):
            error = blamed(error, self._modules) or error
        if isinstance(error, RequestError):
            status = error.status
            message = str(error)
            parameter = error.parameter
            if isinstance(error, Overloaded):
                headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
            if isinstance(error, BodyTooLarge | SlowRequest):
                headers["Connection"] = "close"
            if isinstance(error, Stopping):
                headers |= {"Retry-After": "1", "Connection": "close"}
            if isinstance(error, Unauthorized):
                headers["WWW-Authenticate"] = "Bearer"
            self._log_refused(error, request_id)
        elif isinstance(error, PegboardError):
            status = 500
            message = str(error)
            log.error(
                "request %s failed: %s",
                request_id,
                error,
                exc_info=error if self._log_error_stack else error.__cause__,
            )
        else:
            status = 500
            names = [
                str(frame.f_globals.get("__name__", ""))
                for frame, _ in traceback.walk_tb(error.__traceback__)
            ]
            modules = self._modules()
            plugin = culprit(modules, names[::-1]) or (
                owner and modules.get(type(owner.api).__module__, f"api:{owner.name}")
            )
            where = f"the plugin {plugin}" if plugin else "the server"
            message = (
                f"{where} failed with {type(error).__name__}; the log of the server has request "
                f"{request_id}"
            )
            log.error("request %s: %s failed", request_id, where, exc_info=error)
        return error_response(owner, status, message, parameter, headers)


def _request_id(headers: dict[bytes, bytes]) -> str | None:
    given = headers.get(b"x-request-id")
    if given is None:
        return None
    text = given.decode("latin-1")
    if not REQUEST_ID.fullmatch(text):
        raise RequestError(
            "X-Request-Id must be 1 to 256 visible ASCII characters", parameter="X-Request-Id"
        )
    return text


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise RequestError(
            f"X-data-parallel-rank must be the number of an engine, got {text!r}",
            parameter="X-data-parallel-rank",
        )
    return int(text)


async def refuse_body(response: Response, receive: Receive, send: Send) -> None:
    """Send the response, then read a little more of the body before the connection closes.
    Otherwise a client that is still sending would be cut off before it reads the response."""
    await send(
        {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
    )
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    num_bytes = 0
    with contextlib.suppress(asyncio.TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while num_bytes < LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
    await send({"type": "http.response.body", "body": b""})
