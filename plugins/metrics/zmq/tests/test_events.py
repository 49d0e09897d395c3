"""A subscriber hears over TCP what the prefix cache of an engine stores and evicts, and can ask for
what it missed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from pegboard_metrics_zmq.options import ZmqOptions
from pegboard_metrics_zmq.sink import END, ZmqSink, address_of
from pydantic import ValidationError

from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.actions import ResetPrefixCache
from pegboard.engine.kv.hashes import sha256_block
from pegboard.errors import ConfigError
from pegboard.interfaces.attention import Full, Window
from pegboard.interfaces.metrics import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    MetricsSetup,
    Sample,
)
from pegboard_testing.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("endpoint", "engine", "address"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 2, "tcp://*:5559"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///tmp/events", 0, "ipc:///tmp/events"),
        ("ipc:///tmp/events", 1, "ipc:///tmp/events_dp1"),
        ("tcp://127.0.0.1:*", 1, "tcp://127.0.0.1:*"),
    ],
)
def test_each_engine_has_its_address(endpoint: str, engine: int, address: str) -> None:
    assert address_of(endpoint, engine) == address


TOPIC = "kv@here"
SETUP = MetricsSetup("m")


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Subscriber:
    """Connects to the address of a sink."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, TOPIC.encode())
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self.socket.connect(address)

    def next(self) -> tuple[int, Any]:
        topic, number, payload = self.socket.recv_multipart()
        assert topic == TOPIC.encode() and len(number) == 8
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)


@contextmanager
def connected(**options: Any) -> Iterator[tuple[Subscriber, ZmqSink]]:
    address = free_address()
    sink = ZmqSink(
        ZmqOptions(endpoint=address.replace("127.0.0.1", "*"), topic=TOPIC, **options), SETUP
    )
    subscriber = Subscriber(address)
    time.sleep(0.5)  # until the publisher knows the subscription
    try:
        yield subscriber, sink
    finally:
        sink.close()
        subscriber.socket.close(linger=0)


class Recorder:
    """A sink that keeps the events."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []

    def declare(self, metrics: object) -> None:
        pass

    def publish(self, sample: Sample) -> None:
        self.events += sample.kv_events

    def close(self) -> None:
        pass


def follow(events: list[list[Any]]) -> set[tuple[int, bytes]]:
    """Return what a router believes to be cached. No block may be stored twice or removed without
    being there."""
    cached: set[tuple[int, bytes]] = set()
    for name, *fields in events:
        if name == "AllBlocksCleared":
            cached.clear()
            continue
        group = fields[-1]
        keys = {(group, each) for each in fields[0]}
        if name == "BlockStored":
            assert not keys & cached and len(fields[2]) == len(fields[0]) * fields[3]
            cached |= keys
        else:
            assert name == "BlockRemoved" and keys <= cached
            cached -= keys
    return cached


@pytest.mark.parametrize("retains", [(Full(),), (Full(), Window(6))])
def test_the_events_are_the_prefix_cache(retains: tuple[Any, ...]) -> None:
    """What the events of a cache that evicts describe is exactly what the pool can find. Every hash
    is the hash of its parent, tokens and extra keys."""
    recorder = Recorder()
    with connected(int_block_hashes=False) as (subscriber, sink):
        fake = FakeEngine(retains, num_blocks=30, metrics=[sink, recorder], reports_kv_events=True)
        for index in range(12):
            prompt = [1 + (index * 7 + i) % 50 for i in range(20 + index % 3)]
            fake.generate(prompt, SamplingParams(temperature=0.0, max_tokens=6))
        pool = fake.engine._live.kv.pool
        heard: list[Any] = []
        last = -1
        while len(heard) < len(recorder.events):
            number, (_, events, rank) = subscriber.next()
            assert number == last + 1 and rank == 0
            last = number
            heard += events
        assert follow(heard) == set(pool._block_of)
        names = [event[0] for event in heard]
        assert names.count("BlockRemoved") > 10 and names.count("BlockStored") > 10
        size = fake.limits.block_size
        for name, *fields in heard:
            if name == "BlockStored":
                hashes, parent, token_ids = fields[:3]
                assert fields[3:7] == [size, None, "GPU", None] and fields[7] is None
                for i, block_hash in enumerate(hashes):
                    if parent is not None:
                        assert block_hash == sha256_block(
                            parent, token_ids[i * size : (i + 1) * size], b""
                        )
                    parent = block_hash
        assert fake.ask(ResetPrefixCache()) is True
        number, (_, events, _) = subscriber.next()
        assert (number, events) == (last + 1, [["AllBlocksCleared"]])


def test_adapters_salts_and_integer_hashes() -> None:
    stored = BlocksStored((b"a" * 32, b"b" * 32), None, tuple(range(8)), 4, 1, 7, "poet", "salty")
    with connected() as (subscriber, sink):
        sink.publish(
            Sample(12.5, kv_events=[stored, BlocksRemoved((b"c" * 32,), 1), BlocksCleared()])
        )
        ints = [int.from_bytes(each * 8, "big") for each in (b"a", b"b", b"c")]
        extra = [["poet", "salty"], ["poet"]]
        first = [
            "BlockStored",
            ints[:2],
            None,
            [0, 1, 2, 3, 4, 5, 6, 7],
            4,
            7,
            "GPU",
            "poet",
            extra,
            1,
        ]
        assert subscriber.next() == (
            0,
            [12.5, [first, ["BlockRemoved", ints[2:], "GPU", 1], ["AllBlocksCleared"]], 0],
        )


def test_the_engine_reports_salts() -> None:
    recorder = Recorder()
    fake = FakeEngine(metrics=[recorder], reports_kv_events=True)
    fake.generate(
        list(range(1, 14)), SamplingParams(temperature=0.0, max_tokens=1), cache_salt="salty"
    )
    (event,) = recorder.events
    assert (
        isinstance(event, BlocksStored)
        and event.cache_salt == "salty"
        and event.parent_hash is None
    )


def test_replay_after_a_gap() -> None:
    """Who missed batches gets those that are still kept, with their numbers, and then the end. A
    wrong request gets no answer and does no harm."""
    replay = free_address()
    with connected(replay_endpoint=replay, buffer_steps=3) as (subscriber, sink):
        for number in range(5):
            sink.publish(Sample(float(number), kv_events=[BlocksCleared()]))
        assert [subscriber.next()[0] for _ in range(5)] == [0, 1, 2, 3, 4]
        client = zmq.Context.instance().socket(zmq.DEALER)
        client.setsockopt(zmq.RCVTIMEO, 10_000)
        client.connect(replay)
        client.send_multipart([b"", b"short"])
        for first, expected in ((0, [2, 3, 4]), (4, [4]), (9, [])):
            client.send_multipart([b"", first.to_bytes(8, "big")])
            for number in expected:
                empty, got, payload = client.recv_multipart()
                assert (empty, int.from_bytes(got, "big")) == (b"", number)
                assert msgspec.msgpack.decode(payload)[0] == float(number)
            assert client.recv_multipart() == [b"", END, b""]
        client.close(linger=0)


def test_nobody_and_slow_subscribers_never_block() -> None:
    """Publishing is as fast when nobody listens, and when a subscriber takes nothing."""
    event = BlocksStored((b"a" * 32,) * 8, None, tuple(range(128)), 16)
    with connected(hwm=1, max_queue_size=10) as (subscriber, sink):
        assert subscriber is not None
        started = time.thread_time()
        for number in range(20_000):
            sink.publish(Sample(float(number), kv_events=[event]))
        assert time.thread_time() - started < 2.0
        while sink._waiting:
            time.sleep(0.01)
    alone = ZmqSink(ZmqOptions(endpoint=free_address()), SETUP)
    alone.publish(Sample(1.0, kv_events=[event]))
    started = time.monotonic()
    alone.close()
    assert time.monotonic() - started < 3


def test_wrong_options_are_refused() -> None:
    for wrong in (
        {"endpoint": "5557"},
        {"replay_endpoint": "http://x"},
        {"hwm": 0},
        {"buffer_steps": 0},
        {"topics": "x"},
    ):
        with pytest.raises(ValidationError):
            ZmqOptions(**wrong)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ZmqOptions(
            endpoint="inproc://x-events", replay_endpoint=f"tcp://127.0.0.1:{port}"
        )
        with pytest.raises(
            ConfigError, match=r"cannot bind replay_endpoint 'tcp://.*choose another address"
        ):
            ZmqSink(options, SETUP)
