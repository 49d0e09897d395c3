"""Answers every request with 503 while the model loads, so that a load balancer sees a server that is coming up.

A thread with plain sockets: nothing that has to be imported first, no route, no key, and one answer for all.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

HEAD_LIMIT_BYTES = 64 * 1024
PATIENCE_S = 1.0
"""How long a client may take to send the head of its request."""

_BODY = json.dumps(
    {"error": {"message": "the model is still loading; try again soon", "type": "ServiceUnavailableError", "code": 503}}
).encode()
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class LoadingAnswer:
    """Serves `listener` from `open` until `close`; connections that come later wait for the server behind it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="pegboard-loading", daemon=True)

    def open(self) -> None:
        """Start to listen."""
        self._listener.listen(128)
        self._thread.start()

    def close(self) -> None:
        """Leave the listener to the server; may come again."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):  # it is closed when the start failed
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
            with connection, contextlib.suppress(OSError):  # a client that leaves early misses nothing
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        """Read the head and what has come of the body, answer, and end the connection."""
        deadline, head = time.monotonic() + PATIENCE_S, b""
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
