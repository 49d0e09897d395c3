"""A small HTTP/1.1 client on asyncio streams. It sends one request per connection and reads the
lines of the response as they arrive."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pegboard.errors import PegboardError

LINE_LIMIT = 2**24
"""The longest line of a response, in bytes."""


@dataclass
class Answer:
    """A response: its status, its headers (with lower-case names) and its body, which can be read
    once."""

    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader = field(repr=False)

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields the body as it arrives, without the framing of chunks. Raises PegboardError when
        the body ends too early."""
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while size := int((await self._reader.readline() or b"0").split(b";")[0], 16):
                try:
                    yield await self._reader.readexactly(size)
                    await self._reader.readexactly(2)
                except asyncio.IncompleteReadError as error:
                    raise PegboardError("the server closed the connection early") from error
        elif "content-length" in self.headers:
            yield await self._reader.readexactly(int(self.headers["content-length"]))
        else:
            while part := await self._reader.read(65536):
                yield part

    async def lines(self) -> AsyncIterator[bytes]:
        """Yields the lines of the body as they become complete."""
        rest = b""
        async for part in self.parts():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest

    async def body(self) -> bytes:
        return b"".join([part async for part in self.parts()])


@asynccontextmanager
async def request(
    method: str, url: str, headers: Mapping[str, str], body: bytes = b"", *, verify: bool = True
) -> AsyncIterator[Answer]:
    """Send one request. The connection closes with the context. verify: check the certificate of an
    https server. Raises OSError, and PegboardError for a response that is not HTTP."""
    parts = urlsplit(url)
    context: ssl.SSLContext | None = None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        if not verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
    port = parts.port or (443 if parts.scheme == "https" else 80)
    reader, writer = await asyncio.open_connection(
        parts.hostname, port, ssl=context, limit=LINE_LIMIT
    )
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        given = {
            "Host": parts.netloc,
            "Connection": "close",
            "Content-Length": str(len(body)),
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
        await writer.drain()
        yield await _read_head(reader)
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> Answer:
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(first.split(" ", 2)[1])
    except (
        asyncio.IncompleteReadError,
        asyncio.LimitOverrunError,
        ValueError,
        IndexError,
    ) as error:
        raise PegboardError(f"the server did not answer with HTTP: {error}") from error
    pairs = [line.partition(":") for line in lines if line]
    return Answer(status, {name.strip().lower(): value.strip() for name, _, value in pairs}, reader)
