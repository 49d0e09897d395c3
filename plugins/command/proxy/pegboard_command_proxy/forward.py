"""Sends one request to a server behind the proxy, and to another one if that fails before the first
byte of an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import httpx

from pegboard.errors import PegboardError
from pegboard.log import get_logger
from pegboard_command_proxy.choice import Choice, Choose
from pegboard_command_proxy.prefixes import Prompt
from pegboard_command_proxy.servers import Server, describe

log = get_logger(__name__)

UNAVAILABLE = frozenset({502, 503, 504})
"""The server is loading, stopping, full, or behind another proxy that cannot reach it."""
PASSED_ON = frozenset({"content-type", "retry-after", "x-request-id"})
"""Headers of an answer that the client gets."""
KEPT = frozenset(
    {"authorization", "content-type", "accept", "x-api-key", "anthropic-version", "user-agent"}
)
"""Headers of a request that the server gets, and all that begin with `x-` and `traceparent`."""
RANK = "x-data-parallel-rank"
"""vLLM's header that names the engine of a server. What the client sends there stays."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request. path: with the query. body: as it is sent. server: the only one that may get it;
    None = any."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    prompt: Prompt | None = None
    server: Server | None = None


class Stream:
    """The parts of a stream. Close it, also if it was not read."""

    def __init__(
        self,
        server: Server,
        response: httpx.Response,
        first: bytes,
        rest: AsyncIterator[bytes],
        work: ExitStack,
    ) -> None:
        self._server = server
        self._response = response
        self._first = first
        self._rest = rest
        self._work = work

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts. Raises BrokenAnswer if the server ends too early."""
        yield self._first
        try:
            async for part in self._rest:
                yield part
        except httpx.TransportError as error:
            self._server.failed(describe(error))
            raise BrokenAnswer("the server ended the answer too early") from error

    async def aclose(self) -> None:
        self._work.close()
        await self._response.aclose()


@dataclass(slots=True)
class Answer:
    """An answer. stream: the content if it is sent as server-sent events; `body` is empty then."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: Stream | None = field(default=None, repr=False)


class BrokenAnswer(PegboardError):
    """A server has ended a stream too early."""

    status = 502


class Unreachable(PegboardError):
    """No server could be reached."""

    status = 503


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a client that the servers get."""
    kept = {
        name: value
        for name, value in headers.items()
        if name in KEPT or name.startswith(("x-", "trace"))
    }
    return {**kept, "accept-encoding": "identity"}


class Forwarder:
    """Sends requests to `servers`. attempts: how many of them are tried for one request."""

    def __init__(
        self,
        servers: Sequence[Server],
        choose: Choose,
        client: httpx.AsyncClient,
        attempts: int,
    ) -> None:
        self.servers = servers
        self._choose = choose
        self._client = client
        self._attempts = attempts

    async def send(self, call: Call) -> Answer:
        """Return the answer of the first server that gives one. An answer that says "unavailable"
        is returned if no other server can be tried. Raises Unreachable."""
        reasons: dict[str, str] = {}
        refusal: Answer | None = None
        while len(reasons) < self._attempts:
            left = [
                server
                for server in self.servers
                if server.is_healthy and server.url not in reasons and call.server in (None, server)
            ]
            if not left:
                break
            choice = self._choose(left, call.prompt)
            server = choice.server
            try:
                answer = await self._ask_engine(choice, call)
            except httpx.TransportError as error:
                reasons[server.url] = describe(error)
                server.failed(describe(error))
                continue
            if answer.status not in UNAVAILABLE:
                return answer
            reasons[server.url] = f"status {answer.status}"
            refusal = answer
        if refusal is not None:
            return refusal
        others = {
            server.url: server.reason
            for server in self.servers
            if server.url not in reasons and call.server in (None, server)
        }
        for url, reason in (reasons | others).items():
            log.warning("%s has no answer: %s", url, reason)
        raise Unreachable("no server can be reached; the log of the proxy says why")

    async def _ask_engine(self, choice: Choice, call: Call) -> Answer:
        """Ask the engine that was chosen. A refusal may be about its number, because an engine may
        have gone, so the server is then asked without it."""
        server, rank = choice
        if rank is None or RANK in call.headers:
            return await self._ask(server, call)
        headers = {**call.headers, RANK: str(rank)}
        answer = await self._ask(server, replace(call, headers=headers), rank)
        return await self._ask(server, call) if answer.status == 400 else answer

    async def _ask(self, server: Server, call: Call, rank: int | None = None) -> Answer:
        """Wait for the whole answer, or for the first part of a stream. Raises
        httpx.TransportError."""
        with ExitStack() as work:
            work.enter_context(server.working(rank))
            request = self._client.build_request(
                call.method, server.url + call.path, content=call.body, headers=call.headers
            )
            response = await self._client.send(request, stream=True)
            headers = {name: value for name, value in response.headers.items() if name in PASSED_ON}
            if not headers.get("content-type", "").startswith("text/event-stream"):
                try:
                    body = await response.aread()
                finally:
                    await response.aclose()
                return Answer(response.status_code, headers, body)
            parts = response.aiter_raw()
            try:
                first = await anext(parts, b"")
            except BaseException:
                await response.aclose()
                raise
            stream = Stream(server, response, first, parts, work.pop_all())
            return Answer(response.status_code, headers, b"", stream)
