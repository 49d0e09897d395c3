"""The example subscriber, in its own process, counts the blocks that the engine's events say it
holds."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

from pegboard_metrics_zmq.options import ZmqOptions
from pegboard_metrics_zmq.sink import ZmqSink

from pegboard.interfaces.metrics import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    MetricsSetup,
    Sample,
)

EXAMPLE = Path(__file__).parents[4] / "examples" / "kv_events_subscriber.py"


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def stored(*names: int) -> BlocksStored:
    hashes = tuple(bytes([name]) * 32 for name in names)
    return BlocksStored(hashes, None, tuple(range(4 * len(names))), 4, 0)


def test_the_example_follows_the_blocks() -> None:
    """It starts late and fetches what it missed. The events that follow come as they happen."""
    events = free_address()
    replay = free_address()
    options = ZmqOptions(
        endpoint=events.replace("127.0.0.1", "*"), replay_endpoint=replay.replace("127.0.0.1", "*")
    )
    sink = ZmqSink(options, MetricsSetup("m"))
    sink.publish(Sample(0.0, kv_events=(stored(1, 2, 3),)))
    sink.publish(Sample(0.0, kv_events=(BlocksRemoved((bytes([2]) * 32,), 0), stored(4, 5))))
    command = [
        sys.executable,
        str(EXAMPLE),
        "--endpoint",
        events,
        "--replay",
        replay,
        "--batches",
        "4",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as example:
        try:
            assert example.stdout is not None
            lines = [example.stdout.readline() for _ in range(2)]
            time.sleep(0.5)  # until the publisher knows the subscription
            sink.publish(Sample(0.0, kv_events=(BlocksCleared(),)))
            sink.publish(Sample(0.0, kv_events=(stored(6),)))
            lines += example.communicate(timeout=20)[0].splitlines(keepends=True)
        finally:
            example.kill()
            sink.close()
    assert lines == [
        "batch 0: 1 events, 3 blocks held\n",
        "batch 1: 2 events, 4 blocks held\n",
        "batch 2: 1 events, 0 blocks held\n",
        "batch 3: 1 events, 1 blocks held\n",
    ]
