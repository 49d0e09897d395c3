"""What two engines say to each other over TCP. It imports no torch.

    each side: a hello | the caller: its proof | then requests of the caller
    get: group, hashes, milliseconds to wait → for each hash, 1 byte: 1 = here, 0 = not; if it is
         here, what the transport sends for a block
    put: group, hashes, then the same for each hash → an empty message

For a block, the transport `Stream` sends a CRC-32 and the content, and a `Reading` one a ticket;
when the blocks are read, the reader sends an empty message.

Messages are msgpack with their length in 4 bytes (big endian) before them. Contents have the size
of the group's blocks, which both sides know, because they have compared what their engines are: the
identity of the blocks, the rank, and the facts that the identity is made of, which errors show.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import sys
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from pegboard_kv.facts import decode_facts, describe_difference, encode_facts

PROTOCOL = "pegboard-kv-peers-1"
MAX_MESSAGE = 1 << 20
"""Bytes of a message. A longer one ends the connection."""


class PeerError(Exception):
    """The other engine cannot give or take blocks. The message says why."""


class Hello(msgspec.Struct):
    """What an engine is. facts: JSON, see `pegboard_kv.facts`. nonce: what the other side must sign
    with the key that both have. has_key: whether there is one. transport, endpoint: see
    `Transport`."""

    protocol: str
    identity: str
    rank: int
    byteorder: str
    facts: bytes
    nonce: bytes
    has_key: bool
    transport: str
    endpoint: bytes


class Request(msgspec.Struct):
    """kind: "get" or "put"."""

    kind: str
    group: int
    hashes: list[bytes]
    wait_ms: int = 0


class Line(NamedTuple):
    """A connection to another engine, and the endpoint of that engine's transport."""

    socket: socket.socket
    endpoint: bytes


class Engine:
    """What this rank of the engine says of itself. key: the secret of all engines, or None.
    transport, endpoint: see `Transport`."""

    def __init__(
        self,
        identity: str,
        rank: int,
        facts: Mapping[str, str],
        key: str | None,
        *,
        transport: str,
        endpoint: bytes,
    ) -> None:
        self.transport = transport
        self.endpoint = endpoint
        self.identity = identity
        self.rank = rank
        self.facts = facts
        self.key = None if key is None else key.encode()

    def meet(self, connection: socket.socket, *, calls: bool) -> Line:
        """Exchange hellos and proofs. calls: this side has opened the connection. Raises PeerError
        that shows both sides if the other engine's blocks are not those of this one, OSError."""
        hello = Hello(
            PROTOCOL,
            self.identity,
            self.rank,
            sys.byteorder,
            encode_facts(self.facts),
            secrets.token_bytes(16),
            self.key is not None,
            self.transport,
            self.endpoint,
        )
        send_message(connection, hello)
        try:
            other = receive_message(connection, Hello)
        except msgspec.DecodeError as error:
            raise PeerError(f"it is not an engine with this connector: {error}") from error
        self._compare(other)
        if self.key is not None:
            self._prove(connection, hello, other, calls)
        return Line(connection, other.endpoint)

    def _prove(self, connection: socket.socket, hello: Hello, other: Hello, calls: bool) -> None:
        role = b"caller" if calls else b"called"
        send_message(connection, self._proof(role, other.nonce, hello.nonce))
        expected = self._proof(b"called" if calls else b"caller", hello.nonce, other.nonce)
        if not hmac.compare_digest(receive_message(connection, bytes), expected):
            raise PeerError("it has another PEGBOARD_CLUSTER_KEY; give all engines the same")

    def _proof(self, role: bytes, theirs: bytes, ours: bytes) -> bytes:
        assert self.key is not None
        return hmac.digest(self.key, role + theirs + ours, hashlib.sha256)

    def _compare(self, other: Hello) -> None:
        if other.protocol != PROTOCOL:
            raise PeerError(f"it speaks {other.protocol[:40]!r}, this engine {PROTOCOL!r}")
        if other.transport != self.transport:
            raise PeerError(
                f"it moves blocks by {other.transport[:40]!r}, this engine by {self.transport!r}; "
                "give both the same KV connector"
            )
        if other.has_key != (self.key is not None):
            who = "only the other engine has" if other.has_key else "only this engine has"
            raise PeerError(f"{who} a PEGBOARD_CLUSTER_KEY; give all engines the same")
        if (other.identity, other.byteorder) != (self.identity, sys.byteorder):
            facts = decode_facts(other.facts) or {}
            raise PeerError(
                "its blocks are not those of this engine: "
                f"{describe_difference(self.facts, facts, 'the other engine')}"
            )
        if other.rank != self.rank:
            raise PeerError(f"it is rank {other.rank}, expected rank {self.rank}")


_encode = msgspec.msgpack.Encoder().encode


def send_message(connection: socket.socket, message: Any) -> None:
    """Raises OSError."""
    data = _encode(message)
    connection.sendall(len(data).to_bytes(4, "big") + data)


def receive_message(connection: socket.socket, form: Any) -> Any:
    """Raises OSError, PeerError for a message that is too long, msgspec.DecodeError."""
    length = int.from_bytes(receive(connection, 4), "big")
    if length > MAX_MESSAGE:
        raise PeerError(f"it sent a message of {length} bytes, expected at most {MAX_MESSAGE}")
    return msgspec.msgpack.decode(receive(connection, length), type=form)


def receive(connection: socket.socket, num_bytes: int) -> bytearray:
    """Return exactly so many bytes. Raises OSError."""
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data))
    return data


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer. Raises OSError, also if the connection ends before."""
    while len(buffer):
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the connection was closed")
        buffer = buffer[count:]


def send_block(connection: socket.socket, content: memoryview) -> None:
    """Raises OSError."""
    connection.sendall(zlib.crc32(content).to_bytes(4, "big"))
    connection.sendall(content)


def receive_block(connection: socket.socket, content: memoryview) -> None:
    """Fill `content` with a block. Raises OSError, PeerError if the checksum is wrong."""
    expected = int.from_bytes(receive(connection, 4), "big")
    receive_into(connection, content)
    if zlib.crc32(content) != expected:
        raise PeerError("a block has a wrong checksum")
