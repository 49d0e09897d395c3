"""Messages over a socket between the engine's process and that of a rank. A message is a number, by
which an answer is matched to its question, and a pickle."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Sequence

HEADER = struct.Struct("<QQ")
"""The number of a message, and the bytes of its pickle."""


class LinkClosed(BaseException):
    """The other end of a link is closed. It is not an Exception, so that no code of a worker that
    waits for masks can catch it."""


class Link:
    """One end of a connected stream socket. Methods raise LinkClosed if the other end is
    closed."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.fileno = end.fileno
        self._arrivals = select.poll()
        self._arrivals.register(end, select.POLLIN)

    def send(self, number: int, payload: bytes) -> None:
        """Send a message. Blocks while the other end does not read."""
        try:
            self._socket.sendall(framed(number, payload))
        except OSError as error:
            raise LinkClosed from error

    def push(self, frame: memoryview) -> memoryview:
        """Send as much of a frame as the socket takes at once, and return the rest."""
        try:
            return frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return frame
        except OSError as error:
            raise LinkClosed from error

    def has_message(self, timeout_s: float = 0.0) -> bool:
        """Whether a message, or the end, arrives within `timeout_s` seconds."""
        return bool(self._arrivals.poll(timeout_s * 1000))

    def receive(self) -> tuple[int, bytearray]:
        """Wait for a message and return its number and pickle."""
        number, num_bytes = HEADER.unpack(self._read(HEADER.size))
        return number, self._read(num_bytes)

    def _read(self, num_bytes: int) -> bytearray:
        content = bytearray(num_bytes)
        rest = memoryview(content)
        while rest:
            try:
                num_read = self._socket.recv_into(rest, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise LinkClosed from error
            if not num_read:
                raise LinkClosed
            rest = rest[num_read:]
        return content

    def shut_down(self) -> None:
        """Let both ends read the end of the stream, in whatever thread they wait for a message."""
        with contextlib.suppress(OSError):  # the other end is closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Copies of it that other processes have inherited are useless then."""
        self.shut_down()
        self._socket.close()


def framed(number: int, payload: bytes) -> bytes:
    """Return the bytes that carry a message."""
    return HEADER.pack(number, len(payload)) + payload


def send_all(links: Sequence[Link], frame: bytes, take: Callable[[Link], None]) -> None:
    """Send a frame over several links. While one of them is full, the messages that arrive are
    taken, because the other end may wait until its own message is read. take: receives a message
    of a link. Raises LinkClosed."""
    rest = {link: memoryview(frame) for link in links}
    while rest := {link: left for link, view in rest.items() if (left := link.push(view))}:
        events = select.poll()
        for link in links:
            events.register(link, select.POLLIN | (select.POLLOUT if link in rest else 0))
        ready = {number for number, event in events.poll() if event & ~select.POLLOUT}
        for link in links:
            if link.fileno() in ready:
                take(link)
