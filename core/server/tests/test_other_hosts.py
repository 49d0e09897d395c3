"""How a server takes in the hosts of its other engines. The hosts are sockets here that say what a
host says."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
from collections.abc import Callable, Iterator

import pytest
import zmq

from pegboard.config.schema import EngineConfig, Settings
from pegboard.engine.boundary.engines import Engines, start_processes
from pegboard.engine.boundary.messages import (
    Dead,
    FromEngine,
    Ready,
    Start,
    Stop,
    decode_to_engine,
    encode,
)
from pegboard.env import required_cluster_key
from pegboard.errors import ConfigError, EngineDeadError, PluginBroken
from pegboard_server import other_hosts as hosts
from pegboard_server.engines import start_engines
from pegboard_server.other_hosts import EngineHosts
from pegboard_testing.echo_engine import echo_plan

PATIENCE_MS = 20_000


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class FakeHost:
    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        hosts.secure(self._socket, required_cluster_key("engines"), listens=False)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def say(self, kind: bytes, number: int = 0, content: bytes = b"") -> None:
        self._socket.send_multipart([kind, b"%d" % number, content])

    def offer(self, first: int, count: int, total: int = 3) -> None:
        offer = {"name": "north", "first": first, "count": count, "total": total}
        self.say(hosts.HELLO, content=json.dumps(offer).encode())

    async def hear(self) -> tuple[bytes, int, bytes]:
        """Return the next frame that is not a probe."""
        while True:
            assert await asyncio.to_thread(self._socket.poll, PATIENCE_MS)
            kind, number, content = self._socket.recv_multipart()
            if kind != hosts.PROBE:
                return kind, int(number), content

    async def join(self, first: int, count: int) -> None:
        self.offer(first, count)
        assert (await self.hear())[0] == hosts.CHECK
        self.say(hosts.AGREED)

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


class Heard:
    """What the engines' user hears. end: done when an engine has died."""

    def __init__(self) -> None:
        self.messages: list[FromEngine] = []
        self.end: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()

    def attach(self, engines: Engines) -> None:
        engines.attach(self.messages.append, self.end.set_result)

    async def wait(self) -> FromEngine:
        while not self.messages:
            await asyncio.sleep(0.01)
        return self.messages.pop()


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGBOARD_CLUSTER_KEY", "a secret")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def engines(port: int) -> Iterator[Engines]:
    """Three engines, all on other hosts."""
    settings = {
        "data_parallel_size": 3,
        "data_parallel_size_local": 0,
        "data_parallel_address": "127.0.0.1",
        "data_parallel_rpc_port": port,
    }
    engines = Engines(
        range(0), hosts=EngineHosts(EngineConfig(**settings), "127.0.0.1", "a secret")
    )
    engines.start(echo_plan(**settings))
    yield engines
    folder = engines.folder
    engines.stop()
    assert not folder.parent.exists()


def run(body: Callable) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))


def test_engines_of_two_hosts_are_ready_when_all_are(engines, port):
    async def body() -> None:
        heard = Heard()
        heard.attach(engines)
        one, two = FakeHost(port), FakeHost(port)
        await one.join(0, 2)
        plans = [await one.hear() for _ in range(2)]
        assert [(kind, number) for kind, number, _ in plans] == [
            (hosts.MESSAGE, 0),
            (hosts.MESSAGE, 1),
        ]
        start = decode_to_engine(plans[1][2])
        assert isinstance(start, Start)
        assert pickle.loads(start.plan).settings.engine.data_parallel_rank == 1
        await two.join(2, 1)
        await two.hear()
        for host, number in ((one, 1), (two, 2), (one, 0)):
            assert not heard.messages
            host.say(hosts.MESSAGE, number, encode(Ready({}, [], 10 + number)))
        ready = await heard.wait()
        assert isinstance(ready, Ready) and ready.max_model_len == 10

        two.say(hosts.HEART, 2, b"beat")
        heart = engines.parts[2].folder / "heart"
        while not heart.exists():
            await asyncio.sleep(0.01)
        assert heart.read_bytes() == b"beat"

        # all are told to end; the server waits until they have
        stopping = asyncio.to_thread(engines.stop)
        task = asyncio.get_running_loop().create_task(stopping)
        for host, count in ((one, 2), (two, 1)):
            frames = [await host.hear() for _ in range(count + 1)]
            assert all(decode_to_engine(frame[2]) == Stop() for frame in frames[:-1])
            assert frames[-1][0] == hosts.STOP and frames[-1][2] == hosts.IN_ORDER
            assert not task.done()
            host.say(hosts.ENDED)
        await task
        one.close()
        two.close()

    run(body)


@pytest.mark.parametrize(
    ("offer", "words"),
    [
        ((1, 1, 4), b"data_parallel_size is 4 there, but 3 at the server"),
        ((2, 2, 3), b"waits for engines 1, 2, but this host has engine 3"),
        ((0, 1, 3), b"waits for engines 1, 2, but this host has engine 0"),
    ],
)
def test_hosts_that_are_not_wanted(engines, port, offer, words):
    """They hear why, and the server goes on to wait."""

    async def body() -> None:
        Heard().attach(engines)
        first = FakeHost(port)
        await first.join(0, 1)
        await first.hear()
        other = FakeHost(port)
        other.offer(*offer)
        kind, _, content = await other.hear()
        assert kind == hosts.REFUSED and words in content
        other.close()
        second = FakeHost(port)
        await second.join(1, 2)
        assert (await second.hear())[1] == 1
        for host in (first, second):
            host.say(hosts.ENDED)
            host.close()

    run(body)


def test_a_host_with_other_plugins_leaves(engines, port, caplog):
    async def body() -> None:
        Heard().attach(engines)
        host = FakeHost(port)
        host.offer(0, 3)
        _, _, check = await host.hear()
        pickle.loads(check)()  # the same plugins as here
        host.say(hosts.REFUSED, content=b"pegboard (here 1, there 2)")
        while "host north was refused: pegboard (here 1, there 2)" not in caplog.text:
            await asyncio.sleep(0.01)
        host.close()

    run(body)


def test_the_check_names_other_versions(monkeypatch):
    from pegboard.plugins.hosts import check_same_plugins

    with pytest.raises(PluginBroken, match="pegboard-x"):
        check_same_plugins({"pegboard-x": "1.0"})


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (FakeHost.close, "engine 0: its host north is not connected any more"),
        (lambda host: host.say(hosts.ENDED), "engine 0: its host north was told to end"),
    ],
)
def test_a_host_that_leaves_ends_all(engines, port, leave, words):
    async def body() -> None:
        heard = Heard()
        heard.attach(engines)
        host = FakeHost(port)
        await host.join(0, 2)
        await host.hear()
        leave(host)
        assert str(await heard.end) == words
        host.close()

    run(body)


def test_a_host_of_an_earlier_server_is_told_to_end(engines, port):
    async def body() -> None:
        Heard().attach(engines)
        host = FakeHost(port)
        host.say(hosts.HEART, 0, b"beat")
        assert await host.hear() == (hosts.STOP, 0, b"")
        host.close()

    run(body)


def test_hosts_that_do_not_come(monkeypatch, engines):
    async def body() -> None:
        engines._hosts._limit = 0
        heard = Heard()
        heard.attach(engines)
        message = await heard.wait()
        assert isinstance(message, Dead) and message.is_start
        assert "no host has come for engines 0, 1, 2" in message.failure.message

    run(body)


def test_who_does_not_know_the_key_cannot_speak(engines, port, monkeypatch):
    async def body() -> None:
        Heard().attach(engines)
        monkeypatch.setenv("PEGBOARD_CLUSTER_KEY", "a guess")
        stranger = FakeHost(port)
        stranger.offer(0, 3)
        host = FakeHost.__new__(FakeHost)
        monkeypatch.setenv("PEGBOARD_CLUSTER_KEY", "a secret")
        host.__init__(port)
        await host.join(0, 3)
        assert (await host.hear())[0] == hosts.MESSAGE
        assert not stranger._socket.poll(0)
        host.say(hosts.ENDED)
        host.close()
        stranger.close()

    run(body)


def test_what_the_server_needs(port, monkeypatch):
    config = EngineConfig(
        data_parallel_size=2,
        data_parallel_size_local=1,
        data_parallel_address="127.0.0.1",
        data_parallel_rpc_port=port,
    )
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match="a free port"):
        start_engines(Settings(config))
    monkeypatch.delenv("PEGBOARD_CLUSTER_KEY")
    with pytest.raises(ConfigError, match="PEGBOARD_CLUSTER_KEY"):
        start_engines(Settings(config))
    with pytest.raises(ConfigError, match="only pegboard serve"):
        start_processes(config)
