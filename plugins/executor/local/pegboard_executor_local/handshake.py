"""How processes on several hosts come to trust a connection: both ends show that they know the key
of the cluster, without sending it. Only then are messages read, because they are pickles.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
from typing import Any

from pegboard.env import required_cluster_key

GREETING = b"pegboard ranks 1"
NONCE = 32
SIGNATURE = 32
SIZE = 2
"""Bytes of the length of what a host says of itself."""

ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
)
"""The system asks every second whether the other host is there. The connection ends if no answer
comes for 3 s, but not while the process of the other end is stopped or busy."""


class Stranger(Exception):
    """The other end does not know the key, or it is not Pegboard."""


def required_key() -> bytes:
    """Return the key of the cluster. Raises ConfigError if there is none."""
    return required_cluster_key("ranks").encode()


def admit(end: socket.socket, key: bytes) -> dict[str, Any]:
    """Let a host in, and return what it says of itself. Raises Stranger, or OSError if the
    connection ends or takes too long."""
    mine = os.urandom(NONCE)
    end.sendall(GREETING + mine)
    theirs = read(end, NONCE)
    signature = read(end, SIGNATURE)
    hello = read(end, int.from_bytes(read(end, SIZE), "big"))
    if not hmac.compare_digest(signature, _sign(key, b"host", mine, theirs, hello)):
        raise Stranger("it does not know the key")
    end.sendall(_sign(key, b"engine", theirs, mine))
    content: dict[str, Any] = json.loads(hello)
    return content


def introduce(end: socket.socket, key: bytes, content: dict[str, Any]) -> None:
    """Join the engine's process at the other end. content: what this host says of itself. Raises
    Stranger, or OSError if the connection ends or takes too long."""
    if read(end, len(GREETING)) != GREETING:
        raise Stranger("it does not greet as an engine of Pegboard")
    theirs = read(end, NONCE)
    mine = os.urandom(NONCE)
    hello = json.dumps(content).encode()
    signature = _sign(key, b"host", theirs, mine, hello)
    end.sendall(mine + signature + len(hello).to_bytes(SIZE, "big") + hello)
    try:
        answer = read(end, SIGNATURE)
    except ConnectionError:
        raise Stranger("it refuses the key") from None
    if not hmac.compare_digest(answer, _sign(key, b"engine", mine, theirs)):
        raise Stranger("it does not know the key")


def keep_alive(end: socket.socket) -> None:
    """Let the connection end if the other host vanishes, and let no call on it time out."""
    for level, option, value in ALIVE:
        end.setsockopt(level, option, value)
    end.settimeout(None)


def read(end: socket.socket, num_bytes: int) -> bytes:
    """Read exactly so many bytes. Raises ConnectionError if the stream ends before."""
    content = b""
    while len(content) < num_bytes:
        part = end.recv(num_bytes - len(content))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        content += part
    return content


def _sign(key: bytes, *parts: bytes) -> bytes:
    """Return the signature of the parts. Only the last one may have any length."""
    return hmac.digest(key, b"\0".join(parts), hashlib.sha256)
