"""Files from the web, and only from hosts that may be asked.

A name is looked up once. All its addresses are checked, and the connection goes to one of them, so
a name that gets another address later changes nothing. Proxies of the environment are not used.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from pegboard_media.addresses import is_public
from pegboard_media.limits import (
    MAX_BYTES,
    MAX_FETCH_SECONDS,
    MAX_HEADER_BYTES,
    MAX_REDIRECTS,
    MAX_URL_CHARS,
    Unusable,
)

PORTS = {"http": 80, "https": 443}
NOT_IN_URLS = re.compile(r"[\x00-\x20\x7f\\]")
REDIRECTS = {301, 302, 303, 307, 308}
REFUSED = (
    "may not be fetched; expected an http(s) URL without a user name, whose host has public "
    "addresses and is one of --allowed-media-domains if these are set"
)
"""The one message for all that is refused. A name without an address gets it too, so that nobody
learns which internal names exist."""
FAILED = "could not be fetched; check the URL, or send the file as a data: URL"

Resolve = Callable[[str, int], Sequence[str]]
"""(host, port) → its numeric addresses. Raises OSError."""
Connect = Callable[[str, int, float], socket.socket]
"""(numeric address, port, seconds) → a connection. Raises OSError."""


def resolve_name(host: str, port: int) -> list[str]:
    """Return the numeric addresses that the system knows for a host."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def connect_to(address: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((address, port), seconds)


def looked_up(resolve: Resolve, host: str, port: int, seconds: float) -> Sequence[str]:
    """Return the addresses of a host. The system's look-up has no limit of time, so a thread waits
    for it. Raises OSError after so many seconds."""
    answers: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        try:
            answers.put(resolve(host, port))
        except Exception as error:  # noqa: BLE001 - raised below
            answers.put(error)

    threading.Thread(target=run, daemon=True, name="look-up").start()
    try:
        answer = answers.get(timeout=seconds)
    except Empty:
        raise OSError("the look-up takes too long") from None
    if isinstance(answer, Exception):
        raise answer
    addresses: Sequence[str] = answer
    return addresses


class Web:
    """domains: the hosts that may be asked, whatever their addresses are; () = all hosts with only
    public addresses."""

    def __init__(
        self,
        domains: Iterable[str] = (),
        resolve: Resolve = resolve_name,
        connect: Connect = connect_to,
    ) -> None:
        self._domains = frozenset(domain.lower().rstrip(".") for domain in domains)
        self._resolve = resolve
        self._connect = connect

    def fetch(self, url: str) -> bytes:
        """Return the file at a URL. Follows at most MAX_REDIRECTS redirects, each of which is
        checked like the first URL. Raises Unusable."""
        deadline = time.monotonic() + MAX_FETCH_SECONDS
        try:
            for _ in range(MAX_REDIRECTS + 1):
                content, target = self._answer(url, deadline)
                if target is None:
                    return content
                url = urljoin(url, target)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unusable(FAILED) from error
        raise Unusable(FAILED)

    def _answer(self, url: str, deadline: float) -> tuple[bytes, str | None]:
        """Return the body of one answer, or where it redirects to."""
        parts, host, port = checked(url)
        stream = Stream(self._connection(parts.scheme, host, port, deadline), deadline)
        connection = http.client.HTTPConnection(host, port)
        connection.default_port = PORTS[parts.scheme]  # it is left out of the Host header
        connection.sock = stream
        target = quote(parts.path or "/", safe="%/:=&~+!$,;'@()*")
        query = quote(parts.query, safe="%/:=&?~+!$,;'@()*[]")
        headers = {"User-Agent": "pegboard", "Accept": "*/*", "Accept-Encoding": "identity"}
        try:
            connection.request("GET", f"{target}?{query}" if query else target, headers=headers)
            with connection.getresponse() as response:
                stream.has_headers = True
                if response.status in REDIRECTS:
                    return b"", response.headers["Location"] or ""
                if response.status != 200:
                    raise Unusable(FAILED)
                return body(response), None
        finally:
            stream.end()

    def _connection(self, scheme: str, host: str, port: int, deadline: float) -> socket.socket:
        """Return a connection to the first address that answers."""
        failure: OSError = OSError("no address")
        for address in self._addresses(host, port, deadline):
            try:
                connection = self._connect(address, port, remaining(deadline))
            except OSError as error:
                failure = error
                continue
            if scheme == "http":
                return connection
            try:
                connection.settimeout(remaining(deadline))
                return tls().wrap_socket(connection, server_hostname=host)
            except BaseException:
                connection.close()
                raise
        raise failure

    def _addresses(self, host: str, port: int, deadline: float) -> Sequence[str]:
        """Return the addresses of a host that may be asked."""
        if self._domains and host not in self._domains:
            raise Unusable(REFUSED)
        try:
            addresses = looked_up(self._resolve, host, port, remaining(deadline))
        except (OSError, UnicodeError) as error:
            raise Unusable(REFUSED) from error
        if not addresses or not (self._domains or all(map(is_public, addresses))):
            raise Unusable(REFUSED)
        return addresses


class Stream:
    """A socket for http.client whose reads end together at one deadline."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._num_bytes = 0
        self.has_headers = False

    def sendall(self, content: Any) -> None:
        self._connection.settimeout(remaining(self._deadline))
        self._connection.sendall(content)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(Reads(self))

    def receive(self, buffer: Any) -> int:
        self._connection.settimeout(remaining(self._deadline))
        count = self._connection.recv_into(buffer)
        self._num_bytes += count
        if not self.has_headers and self._num_bytes > MAX_HEADER_BYTES + io.DEFAULT_BUFFER_SIZE:
            raise OSError("the headers are too large")
        return count

    def close(self) -> None:
        """Do nothing: http.client closes its socket before it reads the body."""

    def end(self) -> None:
        self._connection.close()


class Reads(io.RawIOBase):
    """The reading half of a Stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._stream.receive(buffer)


def checked(url: str) -> tuple[SplitResult, str, int]:
    """Return the parts of a URL that may be fetched if its host may be asked, the host in lower
    case, and the port."""
    is_plain = len(url) <= MAX_URL_CHARS and NOT_IN_URLS.search(url) is None
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        port = PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
        host = host if host.isascii() else host.encode("idna").decode("ascii")
    except ValueError as error:
        raise Unusable(REFUSED) from error
    if not is_plain or not host or parts.scheme not in PORTS or "@" in parts.netloc or port < 1:
        raise Unusable(REFUSED)
    return parts, host.lower(), port


def body(response: http.client.HTTPResponse) -> bytes:
    """Return the body of an answer. What Content-Length says is not trusted."""
    content = bytearray()
    while part := response.read1(2**20):
        content += part
        if len(content) > MAX_BYTES:
            raise Unusable(f"is larger than {MAX_BYTES} bytes")
    if response.length:  # the connection ended before the body did
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(content)


def remaining(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the time is over")
    return seconds


@cache
def tls() -> ssl.SSLContext:
    return ssl.create_default_context()
