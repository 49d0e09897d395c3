"""The metrics sink `zmq`: a thread sends the KV events of each step to subscribers, and old ones to
who asks for them.

A message has three frames: topic, number of the batch (8 bytes, big endian), batch (`messages`). A
gap between numbers means that batches were lost. A replay request is the first wanted number, from
a REQ or DEALER socket (from a DEALER after an empty frame). The answers are (empty frame, number,
batch), and end with the number -1 and an empty batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import count

import msgspec
import zmq

from pegboard.errors import ConfigError
from pegboard.interfaces.metrics import Metric, MetricsSetup, Sample
from pegboard.log import get_logger
from pegboard_metrics_zmq.messages import batch_of
from pegboard_metrics_zmq.options import ZmqOptions

log = get_logger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
"""The number after the last batch of a replay."""

LEAVE_S = 1.0
"""Seconds that sending the waiting batches may take when the engine stops."""

_pair = count()


def address_of(endpoint: str, engine: int) -> str:
    """Return the address of one of several engines: its number is added to the port of the
    endpoint, or to its name if it has no port. Engine 0 has the endpoint itself."""
    address, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{engine}" if engine else endpoint
    return f"{address}{colon}{int(port) + engine}" if port.isdecimal() else endpoint


class ZmqSink:
    """Raises ConfigError if an address cannot be used."""

    def __init__(self, options: ZmqOptions, setup: MetricsSetup) -> None:
        self._options = options
        self._context = zmq.Context.instance()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._events = self._open(
                zmq.PUB, address_of(options.endpoint, setup.engine), "endpoint"
            )
            self._replay = (
                self._open(
                    zmq.ROUTER, address_of(options.replay_endpoint, setup.engine), "replay_endpoint"
                )
                if options.replay_endpoint
                else None
            )
        except ConfigError:
            self._close_sockets()
            raise
        wake = f"inproc://pegboard-kv-events-{next(_pair)}"
        self._wakes = self._open(zmq.PAIR, wake, "wake", binds=True)
        self._wake = self._open(zmq.PAIR, wake, "wake", binds=False)
        self._waiting: deque[tuple[int, Sample]] = deque(maxlen=options.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=options.buffer_steps)
        self._numbers = count()
        self._is_closing = False
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def declare(self, metrics: Sequence[Metric]) -> None:
        """Do nothing: KV events do not depend on the declared metrics."""

    def publish(self, sample: Sample) -> None:
        """Hand the sample's KV events to the thread. If too many wait, the oldest are dropped with
        one warning."""
        if not sample.kv_events:
            return
        if len(self._waiting) == self._waiting.maxlen and not self._has_warned:
            self._has_warned = True
            log.warning(
                "KV events are dropped: more than %d batches wait to be sent (max_queue_size)",
                self._options.max_queue_size,
            )
        self._waiting.append(
            (
                next(self._numbers),
                Sample(sample.time_s, engine=sample.engine, kv_events=sample.kv_events),
            )
        )
        self._notify()

    def close(self) -> None:
        """Send what waits, within LEAVE_S, and stop the thread, which closes the sockets."""
        self._is_closing = True
        self._notify()
        self._thread.join(LEAVE_S)
        self._wake.close(linger=0)

    def _open(
        self, kind: int, address: str, option: str, *, binds: bool | None = None
    ) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        # a lost wake-up would leave batches waiting
        socket.set_hwm(0 if kind == zmq.PAIR else self._options.hwm)
        if binds is None:
            binds = (
                kind == zmq.ROUTER
                or "*" in address
                or "::" in address
                or not address.startswith("tcp://")
            )
        try:
            (socket.bind if binds else socket.connect)(address)
        except zmq.ZMQError as error:
            done = "bind" if binds else "connect to"
            raise ConfigError(
                f"kv_events_config: cannot {done} {option} {address!r}: {error}; choose another "
                "address"
            ) from error
        return socket

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)

    def _notify(self) -> None:
        self._wake.send(b"", zmq.DONTWAIT)

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in filter(None, (self._wakes, self._replay)):
            poller.register(socket, zmq.POLLIN)
        while not self._is_closing or self._waiting:
            ready = dict(poller.poll())
            if self._wakes in ready:
                self._wakes.recv()
            while self._waiting:
                self._send(*self._waiting.popleft())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        self._events.close(linger=int(1000 * LEAVE_S))
        for socket in filter(None, (self._wakes, self._replay)):
            socket.close(linger=0)

    def _send(self, number: int, sample: Sample) -> None:
        payload = msgspec.msgpack.encode(
            batch_of(sample, int_hashes=self._options.int_block_hashes)
        )
        self._sent.append((number, payload))
        self._events.send_multipart(
            [self._options.topic.encode(), number.to_bytes(8, "big"), payload]
        )

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answer one request. ZeroMQ drops answers to a subscriber that does not take them."""
        client, *frames = replay.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            sizes = [len(frame) for frame in frames]
            log.warning(
                (
                    "a replay request of KV events has frames of %s bytes; expected an empty one "
                    "and one of 8"
                ),
                sizes,
            )
            return
        first = int.from_bytes(frames[1], "big")
        for number, payload in self._sent:
            if number >= first:
                replay.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
        replay.send_multipart([client, b"", END, b""])
