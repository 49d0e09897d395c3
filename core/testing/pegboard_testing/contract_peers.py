"""Contract tests of KV connectors whose engines exchange blocks (`pegboard_kv.peers`). A plugin's
test file:

class TestMyConnector(PeersContract):
    def worker(self, setup: KVConnectorSetup, **options: Any) -> PeerWorker:
        return MyWorker(MyOptions(**options), setup)
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pegboard.data.batch import TransferReport
from pegboard.interfaces.attention import Full, KVGroup, KVView, Retain, State, Window
from pegboard.interfaces.kv_connector import BlockView, KVConnectorSetup
from pegboard.interfaces.scheduling_policy import RequestView
from pegboard_kv.peers.memory import Arena, address_of
from pegboard_kv.peers.options import PeerOptions
from pegboard_kv.peers.scheduler import PeerScheduler
from pegboard_kv.peers.store import HostStore
from pegboard_kv.peers.transport import Reading, Transport
from pegboard_kv.peers.worker import PeerWorker
from pegboard_kv.scheduler import StoreScheduler
from pegboard_testing.contract_kv_connector import TorchViews, greedy
from pegboard_testing.contract_kv_states import MovesStates
from pegboard_testing.fake_connectors import Halves
from pegboard_testing.fake_engine import FakeEngine

PROMPT = range(21)
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
"""What the proxy gives the first engine."""


def free_ports(count: int) -> int:
    """Return the first of `count` free ports."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        if first + count < 65536 and not any(answers(first + i) for i in range(1, count)):
            return first


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Peer:
    """An engine with the connector. worker: makes the worker half from a setup and options."""

    def __init__(
        self,
        worker: Callable[..., PeerWorker],
        retains: Sequence[Retain] = (Full(),),
        identity: str = "a",
        **options: Any,
    ) -> None:
        self.port = free_ports(1)
        given = {"port": self.port, "timeout_s": 5.0, "size_gb": 0.01, **options}

        def halves(setup: KVConnectorSetup) -> Halves:
            self.worker = worker(setup, **given)
            return PeerScheduler(PeerOptions(**given), setup), TorchViews(self.worker)

        self.engine = FakeEngine(retains, kv=halves, identity=identity)

    def run(
        self, parameters: dict[str, Any], prompt: Sequence[int] = PROMPT
    ) -> tuple[Any, Any, Any]:
        """Return the tokens, the KV transfer parameters and the number of tokens that were not
        computed."""
        result = self.engine.generate(prompt, greedy(6), kv_transfer_params=parameters)
        self.engine.check_idle()
        last = result.deltas[-1]
        return result.token_ids, last.kv_transfer_params, result.deltas[0].num_cached_tokens


Start = Callable[..., Peer]


def peers(worker: Callable[..., PeerWorker]) -> Iterator[Start]:
    """Yield a function that makes a `Peer`. Afterwards, all of them are closed, and no thread of
    theirs is left."""
    started: list[Peer] = []

    def make(*arguments: Any, **options: Any) -> Peer:
        started.append(Peer(worker, *arguments, **options))
        return started[-1]

    yield make
    for peer in started:
        peer.worker.close()
    until(lambda: not any(thread.name.startswith("kv-") for thread in threading.enumerate()))


def loads_nothing(second: Peer, parameters: dict[str, Any], seconds: float = 4.0) -> None:
    """The prompt is computed, and the tokens are right."""
    expected = FakeEngine(identity=second.engine.plan.identity).generate(PROMPT, greedy(6))
    begun = time.monotonic()
    tokens, _, _ = second.run(parameters)
    assert time.monotonic() - begun < seconds
    assert tokens == expected.token_ids


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Lasting:
    """A worker half that serves blocks until the test has ended."""

    def __init__(self, half: PeerWorker) -> None:
        self.half = half

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        self.half.register(views, groups)

    def save(self, plan: bytes) -> None:
        self.half.save(plan)

    def begin(self, plan: bytes) -> None:
        self.half.begin(plan)

    def end(self) -> TransferReport:
        return self.half.end()

    def close(self) -> None:
        """The test closes it."""


class Known:
    """The `BlockStore` of what the worker half of the engine before has."""

    def __init__(self, store: HostStore | None) -> None:
        self._store = store

    def find(self, group: int, block_hash: bytes) -> int | None:
        return 0 if self._store is not None and (group, block_hash) in self._store else None

    def use(self, group: int, block_hash: bytes) -> int:
        return 0

    def reserve(self, group: int, block_hash: bytes) -> int | None:
        return 0

    def sent(self) -> None:
        pass


class FromBefore(PeerScheduler):
    """As if every request named the engine before, and how many tokens it has."""

    def __init__(
        self, options: PeerOptions, setup: KVConnectorSetup, before: tuple[int, HostStore] | None
    ) -> None:
        super().__init__(options, setup)
        self._store = Known(before and before[1])
        self._before = before

    def saves(self, request: RequestView) -> bool:
        return True

    def end_of(self, request: RequestView, start: int) -> int:
        return StoreScheduler.end_of(self, request, start)

    def allocated(self, request: RequestView, blocks: BlockView, num_external_tokens: int) -> None:
        StoreScheduler.allocated(self, request, blocks, num_external_tokens)
        if num_external_tokens:
            assert self._before is not None
            self._sources[request.key] = ("127.0.0.1", self._before[0])


class PeersContract(MovesStates):
    """Every connector whose engines exchange blocks passes these. Override `worker`."""

    def worker(self, setup: KVConnectorSetup, **options: Any) -> PeerWorker:
        """Return a worker half. options: those of `PeerOptions`."""
        raise AssertionError("override PeersContract.worker")

    @pytest.fixture(autouse=True)
    def workers(self) -> Iterator[None]:
        self.halves_in_use: list[Lasting] = []
        self.last: tuple[int, HostStore] | None = None
        self.port = 0
        yield
        for worker in self.halves_in_use:
            worker.half.close()

    @pytest.fixture
    def start(self) -> Iterator[Start]:
        yield from peers(self.worker)

    def halves(self, setup: KVConnectorSetup) -> Halves:
        """An engine loads from the one before it."""
        if setup.rank == 0:
            self.port = free_ports(2)
        options: dict[str, Any] = {
            "port": self.port + setup.rank,
            "timeout_s": 20,
            "size_gb": 0.01,
        }
        worker = Lasting(self.worker(setup, **options))
        self.halves_in_use.append(worker)
        scheduler = FromBefore(PeerOptions(**options), setup, self.last)
        if setup.rank == 0:
            self.last = (self.port, worker.half.store)
        return scheduler, worker

    @pytest.mark.parametrize(
        "retains", [[Full()], [Full(), Window(6)], [Full(), State(8)]], ids=str
    )
    def test_pull(self, start: Start, retains: list[Retain]) -> None:
        """The answer of the first engine is what the second one needs. Two first and two second
        engines go together in any way."""
        firsts = [start(retains), start(retains)]
        seconds = [start(retains), start(retains)]
        end = 16 if State(8) in retains else 20
        for number, first in enumerate(firsts):
            prompt = [number, *PROMPT]
            tokens, answer, cached = first.run(ASK, prompt)
            assert answer == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_host": "127.0.0.1",
                "remote_port": first.port,
                "remote_num_tokens": 24,
                "remote_first_hash": answer["remote_first_hash"],
            }
            assert cached == 0
            for second in seconds:
                assert second.run(answer, prompt) == (tokens, None, end)

    def test_push(self, start: Start) -> None:
        """The first engine sends its blocks to the second one, which waits for them."""
        first = start()
        second = start()
        where = {"remote_host": "127.0.0.1", "remote_port": second.port}
        parameters = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_num_tokens": 24,
            "remote_first_hash": start().run(ASK)[1]["remote_first_hash"],
        }
        answered = []
        waiting = threading.Thread(target=lambda: answered.append(second.run(parameters)))
        waiting.start()
        tokens, given, _ = first.run({**ASK, **where})
        waiting.join(20)
        assert given == parameters
        assert answered == [(tokens, None, 20)]

    @pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
    def test_roles(self, start: Start, role: str) -> None:
        first = start()
        second = start(role=role)
        _, answer, _ = first.run(ASK)
        _, given, cached = second.run({**answer, "do_remote_decode": True})
        assert cached == (20 if role == "kv_consumer" else 0)
        assert (given is None) == (role == "kv_consumer")

    def test_an_engine_that_is_gone(self, start: Start) -> None:
        first = start()
        second = start()
        _, answer, _ = first.run(ASK)
        first.worker.close()
        loads_nothing(second, answer)
        loads_nothing(second, answer)

    def test_blocks_that_are_gone(self, start: Start) -> None:
        first = start()
        second = start(timeout_s=0.6)
        _, answer, _ = first.run(ASK)
        first.worker.store.clear()
        loads_nothing(second, answer)


class ReadingContract(PeersContract):
    """Every such connector with a `Reading` transport passes these."""

    def test_a_block_that_is_overwritten(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its checksum was sent before."""
        first = start()
        second = start()
        _, answer, _ = first.run(ASK)
        transport = type(second.worker._transport)
        read = transport.read  # type: ignore[attr-defined]

        def damaged(side: Any, endpoint: bytes, parts: Any, end: float) -> None:
            read(side, endpoint, parts, end)
            parts[0][1][0] ^= 1

        monkeypatch.setattr(transport, "read", damaged)
        loads_nothing(second, answer)

    def test_memory_is_free_again(self, start: Start) -> None:
        """Blocks that are kept make room for others, and loads leave nothing, also if they fail."""
        first = start(size_gb=1e-5)
        second = start(size_gb=1e-5)
        for number in range(40):
            prompt = [number, *PROMPT]
            tokens, answer, _ = first.run(ASK, prompt)
            assert second.run(answer, prompt) == (tokens, None, 20)
        first.worker.close()
        loads_nothing(second, first.run(ASK)[1])
        assert second.worker._transport.memory.take(whole(second)) is not None

    def test_memory_that_is_in_use(self, start: Start, caplog: pytest.LogCaptureFixture) -> None:
        first = start()
        second = start()
        _, answer, _ = first.run(ASK)
        part = second.worker.store.room(whole(second))
        loads_nothing(second, answer)
        assert part is not None and "raise the option size_gb" in caplog.text

    def test_another_transport(self, start: Start, caplog: pytest.LogCaptureFixture) -> None:
        """Engines say so before the first block."""
        first = start()
        second = start()
        name = second.worker._engine.transport
        second.worker._engine.transport = "another"
        _, answer, _ = first.run(ASK)
        loads_nothing(second, answer)
        assert f"it moves blocks by {name!r}, this engine by 'another'" in caplog.text


def whole(peer: Peer) -> int:
    """Return how many bytes can be taken from an arena that nobody uses."""
    memory = peer.worker._transport.memory
    assert isinstance(memory, Arena)
    return memory.num_bytes // 64 * 64


def serve(worker: Callable[..., PeerWorker]) -> None:
    """Be an engine in a process of its own: compute the prompt, write the answer to standard
    output, and serve until standard input ends."""
    answer = Peer(worker).run(ASK)
    print(f"answer {msgspec.json.encode(answer).decode()}", flush=True)
    sys.stdin.read()


def check_two_processes(worker: Callable[..., PeerWorker], program: Path) -> None:
    """The first engine is in a process of its own, which is killed. program: calls `serve`."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, str(program)], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith(b"answer "))
        tokens, answer, _ = msgspec.json.decode(line.removeprefix(b"answer "))
        for start in peers(worker):
            second = start()
            assert second.run(answer) == (tokens, None, 20)
            assert second.run(answer, [*PROMPT, 5])[2] == 20
            process.kill()
            process.wait()
            loads_nothing(start(), answer)


def part(side: Transport, content: bytes) -> memoryview:
    """Return a part of a transport's memory with this content."""
    memory = side.memory.take(len(content))
    assert memory is not None
    memory[:] = content
    return memory


def soon() -> float:
    """Return the time until which a test waits."""
    return time.monotonic() + 5


def check_read(first: Reading, second: Reading) -> None:
    """The second transport reads what is in the first one's memory."""
    there = [part(first, bytes([number]) * 1000) for number in range(3)]
    here = [part(second, bytes(1000)) for _ in there]
    addresses = [address_of(each) for each in there]
    for _ in range(2):
        second.read(first.endpoint, list(zip(addresses, here, strict=True)), soon())
    assert [bytes(each) for each in here] == [bytes([number]) * 1000 for number in range(3)]
