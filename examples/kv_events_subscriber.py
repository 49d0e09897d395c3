"""Follows which KV blocks an engine holds, as a router does. A gap in the numbers is filled from
the engine's replay address.

Start the engine with
--kv-events-config '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint":
"tcp://*:5558"}'
"""

import argparse
from collections.abc import Iterator

import msgspec
import zmq

END = -1
WAIT_MS = 2000


def earlier(address: str, first: int) -> Iterator[tuple[int, bytes]]:
    """Yield the numbered batches from `first` on that the engine still has."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        while socket.poll(WAIT_MS):
            _, number, payload = socket.recv_multipart()
            if (at := int.from_bytes(number, "big", signed=True)) == END:
                return
            yield at, payload


def batches(endpoint: str, replay: str) -> Iterator[tuple[int, bytes]]:
    """Yield every batch once, in order, from the oldest that the engine still has."""
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        expected = 0
        for number, payload in earlier(replay, 0):
            expected = number + 1
            yield number, payload
        while True:
            _, frame, live = socket.recv_multipart()
            at = int.from_bytes(frame, "big")
            for number, payload in earlier(replay, expected) if at > expected else ():
                if expected <= number < at:
                    expected = number + 1
                    yield number, payload
            if at >= expected:
                expected = at + 1
                yield at, live


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:5557")
    parser.add_argument("--replay", default="tcp://127.0.0.1:5558")
    parser.add_argument("--batches", type=int, default=0, help="stop after this number; 0 = never")
    asked = parser.parse_args()
    held: set[tuple[int | None, int | bytes]] = set()
    for count, (number, payload) in enumerate(batches(asked.endpoint, asked.replay), 1):
        _, events, _ = msgspec.msgpack.decode(payload)
        for name, *fields in events:
            if name == "AllBlocksCleared":
                held.clear()
                continue
            blocks = {(fields[-1], block) for block in fields[0]}
            held = held | blocks if name == "BlockStored" else held - blocks
        print(f"batch {number}: {len(events)} events, {len(held)} blocks held", flush=True)
        if count == asked.batches:
            return


if __name__ == "__main__":
    main()
