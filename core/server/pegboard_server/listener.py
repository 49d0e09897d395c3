"""The listening socket. It is bound before the model loads, so that a port in use is reported at
once. It answers 503 until the model is loaded."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import stat
import threading
import time
from pathlib import Path

from pegboard.errors import ConfigError, PegboardError
from pegboard_server.settings import ServerConfig

BACKLOG = 2048
HEAD_LIMIT_BYTES = 64 * 1024
PATIENCE_S = 1.0
"""How long a client may take to send the head of its request."""

_BODY = json.dumps(
    {
        "error": {
            "message": "the model is still loading; try again soon",
            "type": "ServiceUnavailableError",
            "code": 503,
        }
    }
).encode()
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: "
    b"1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


def bind_socket(config: ServerConfig) -> socket.socket:
    """Bind the socket. It does not listen yet. Raises ConfigError that names a wrong setting, or
    PegboardError if the address is in use or cannot be bound."""
    return _bind_unix(config.uds) if config.uds else _bind_tcp(config.host, config.port)


def _bind_tcp(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be in [0, 65535], got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"host {host!r} cannot be resolved: {error}; expected an address of this machine"
        ) from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise bind_error(error, host, port) from error
    return listener


def bind_error(error: OSError, host: str, port: int) -> PegboardError:
    if error.errno == errno.EADDRINUSE:
        return PegboardError(
            f"port {port} on {host} is already in use; choose another port, or 0 for any free one"
        )
    if error.errno == errno.EACCES:
        return ConfigError(
            f"port {port} on {host} needs more rights than this process has; choose a port from "
            "1024 on"
        )
    return PegboardError(f"cannot listen on {host} port {port}: {error.strerror or error}")


def _bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket. The socket file of a dead server is replaced. Raises PegboardError when a
    server still listens on it, and ConfigError when the file is not a socket."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise ConfigError(f"uds {path!r} exists and is not a socket; give another path")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise PegboardError(f"uds {path!r} is already in use by another server")
        Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise PegboardError(f"cannot listen on uds {path!r}: {error.strerror or error}") from error
    return listener


def address_of(listener: socket.socket, config: ServerConfig) -> str:
    """The address for clients: http(s)://host:port with the real port, or unix:path."""
    if config.uds:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class LoadingAnswer:
    """Answers every request with 503 while the model loads, so that a load balancer sees that the
    server is starting.

    Serves `listener` from `open` until `close`. Connections that arrive later wait for the server.
    It is a thread with plain sockets, so it needs no imports, and it gives the same answer to all
    requests.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="pegboard-loading", daemon=True)

    def open(self) -> None:
        """Start listening."""
        self._listener.listen(128)
        self._thread.start()

    def close(self) -> None:
        """Leave the listener to the server. May be called more than once."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):  # the listener is already closed when startup failed
            self._listener.settimeout(None)

    def _serve(self) -> None:
        self._listener.settimeout(0.05)
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            # a client that disconnects early needs no answer
            with connection, contextlib.suppress(OSError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        """Read the head and the part of the body that has arrived, answer, and end the
        connection."""
        deadline = time.monotonic() + PATIENCE_S
        head = b""
        while b"\r\n\r\n" not in head and len(head) < HEAD_LIMIT_BYTES:
            left = deadline - time.monotonic()
            if left <= 0 or self._closing.is_set():
                return
            connection.settimeout(min(left, 0.1))
            try:
                data = connection.recv(65536)
            except TimeoutError:
                continue
            if not data:
                return
            head += data
        connection.settimeout(PATIENCE_S)
        connection.sendall(_ANSWER)
        connection.shutdown(socket.SHUT_WR)
