"""The watchdog: what hangs in the engine is written to the heart, and what blocks the event loop is
interrupted."""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import subprocess
import sys
import threading
import time
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import pytest

from pegboard.errors import PluginFailure, culprit
from pegboard_server import watchdog
from pegboard_server.engine_watch import EngineWatch
from pegboard_server.settings import ServerConfig
from pegboard_server.watchdog import (
    HEART_BYTES,
    Beat,
    Heart,
    LoopGuard,
    encode_beat,
    loading_watched,
    plugin_in,
    stacks_of,
)

CONFIG = ServerConfig(engine_stall_s=60, engine_end_s=300)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def heart(tmp_path: Path) -> tuple[Heart, Clock, Path]:
    clock = Clock()
    path = tmp_path / "heart"
    return Heart(path, CONFIG, clock), clock, path


def test_a_call_that_hangs_is_told_and_then_ended(tmp_path: Path) -> None:
    reader, _, path = heart(tmp_path)
    assert reader.look() == ("", False)  # the engine loads
    for count, (stalled_s, told) in enumerate(
        [(0.0, ("", False)), (59.0, ("", False)), (61.0, ("it hangs for 61 s", False))], 1
    ):
        path.write_bytes(encode_beat(Beat(count, stalled_s, "it hangs")).ljust(HEART_BYTES))
        assert reader.look() == told
    path.write_bytes(encode_beat(Beat(9, 300.0, "it hangs")))
    assert reader.look() == ("it hangs for 300 s", True)
    path.write_bytes(encode_beat(Beat(10)))
    assert reader.look() == ("", False)


def test_a_call_that_does_not_move_while_a_model_loads_is_told() -> None:
    """Not one that is slow and goes on, and not a compiler."""
    owners = {__name__: "weight_loader:x (acme 1.0)"}
    records: queue.Queue[logging.LogRecord] = queue.Queue()
    handler = QueueHandler(records)
    watchdog.log.addHandler(handler)
    try:
        with loading_watched(lambda: owners, log_after_s=1.0):
            for _ in range(25):
                _step()
            subprocess.run([sys.executable, "-c", "import time; time.sleep(1.8)"], check=True)
        assert records.empty()
        with loading_watched(lambda: owners, log_after_s=1.0):
            record = records.get(timeout=60)
    finally:
        watchdog.log.removeHandler(handler)
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert "plugin weight_loader:x (acme 1.0) has been in the same call for " in message
    assert "records.get(timeout=60)" in message


def _step() -> None:
    """A tenth of a second, at many places."""
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        sum(range(100))


def test_a_heart_that_stands_still_is_a_stopped_process(tmp_path: Path) -> None:
    reader, clock, path = heart(tmp_path)
    path.write_bytes(encode_beat(Beat(1)))
    assert reader.look() == ("", False)
    clock.now += 59
    assert reader.look() == ("", False)
    clock.now += 2
    reason, is_over = reader.look()
    assert "the engine process does not run" in reason and "for 61 s" in reason and not is_over
    clock.now += 240
    assert reader.look()[1]


def test_long_texts_fit_into_the_heart() -> None:
    assert len(encode_beat(Beat(10**9, 1e9, '"\x01' * 5000))) <= HEART_BYTES


class Loop:
    """A thread that runs `_serve`, as the engine's main thread does. Calls hang until `release` is
    set."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.entered = threading.Event()
        self.calls = 0
        self.thread = threading.Thread(target=lambda: serve(self), daemon=True)

    def step(self) -> None:
        self.entered.set()
        self.release.wait()


def serve(loop: Loop) -> None:
    while not loop.release.is_set():
        loop.step()


@pytest.fixture
def watched(tmp_path: Path) -> Any:
    loop = Loop()
    clock = Clock()
    transfers: dict[object, str] = {}
    watch = EngineWatch(
        tmp_path / "heart",
        {__name__: "model:slow (acme 1.0)"},
        lambda: transfers,
        log_after_s=10,
        loop=serve,
        clock=clock,
    )
    loop.thread.start()
    loop.entered.wait()
    watch._thread = loop.thread.ident
    yield watch, loop, clock, transfers
    loop.release.set()
    loop.thread.join()


def test_the_call_that_runs_and_its_plugin_are_told(
    watched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    watch, loop, clock, _ = watched
    assert watch.beat().stalled_s == 0
    clock.now += 9
    assert watch.beat() == Beat(2, 9.0, "") and not caplog.records
    clock.now += 2
    told = "a call into plugin model:slow (acme 1.0) has not returned"
    assert watch.beat() == Beat(3, 11.0, told)
    assert len(caplog.records) == 1 and told in caplog.text and "self.release.wait()" in caplog.text
    clock.now += 3
    watch.beat()
    assert len(caplog.records) == 1  # told again only after twice the time
    clock.now += 20
    watch.beat()
    assert len(caplog.records) == 2
    loop.release.set()
    loop.thread.join()
    assert watch.beat().stalled_s == 0


def test_a_transfer_that_is_never_reported_is_told(watched: Any) -> None:
    watch, loop, clock, transfers = watched
    loop.release.set()
    loop.thread.join()
    transfers["a"] = "KV connector x has not reported the load of a"
    assert watch.beat().stalled_s == 0
    clock.now += 70
    transfers["b"] = "b"
    assert watch.beat() == Beat(2, 70.0, "KV connector x has not reported the load of a")
    del transfers["a"]
    clock.now += 5
    assert watch.beat().stalled_s == 5


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["acme_x.deep.part", "acme_y", "pegboard.engine.engine"], "x"),
        (["torch.nn", "pegboard.layers.linear", "acme_y", "acme_x"], "y"),
        (["pegboard.engine.scheduler"], None),
    ],
)
def test_the_innermost_plugin_is_the_culprit(names: list[str], expected: str | None) -> None:
    assert culprit({"acme_x": "x", "acme_y": "y"}, names) == expected


def spin() -> None:
    while True:
        pass


def backtrack() -> None:
    """A regular expression that takes years and never lets go of the interpreter lock."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def endure() -> None:
    """Catches everything once."""
    try:
        spin()
    except PluginFailure:
        spin()


@pytest.mark.parametrize("hang", [spin, backtrack, endure])
def test_code_that_blocks_the_loop_is_interrupted(
    hang: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the request that blocks fails. The others are served meanwhile and afterwards."""

    async def request() -> None:
        await asyncio.sleep(0)
        hang()

    async def other() -> str:
        await asyncio.sleep(0.01)
        return "done"

    async def main() -> list[Any]:
        with LoopGuard(
            lambda: {__name__: "tool_parser:slow (acme 1.0)"}, 0.1, tick_s=0.02
        ).active():
            return await asyncio.gather(request(), other(), return_exceptions=True)

    failure, done = asyncio.run(main())
    assert (
        isinstance(failure, PluginFailure)
        and failure.plugin == "tool_parser:slow (acme 1.0)"
        and done == "done"
    )
    assert "did not return within 0.1 s" in str(failure) and hang.__name__ in caplog.text


def test_plugin_code_that_blocks_a_thread_is_interrupted(caplog: pytest.LogCaptureFixture) -> None:
    """Only this request fails, and the thread serves others again."""

    async def main() -> list[Any]:
        with LoopGuard(lambda: {__name__: "tokenizer:slow (acme 1.0)"}, 0.1, tick_s=0.02).active():
            return await asyncio.gather(
                asyncio.to_thread(spin), asyncio.to_thread(int, "5"), return_exceptions=True
            )

    failure, done = asyncio.run(main())
    assert (
        isinstance(failure, PluginFailure)
        and failure.plugin == "tokenizer:slow (acme 1.0)"
        and done == 5
    )
    assert (
        "did not return within 0.1 s" in str(failure)
        and "blocked a thread" in caplog.text
        and "spin" in caplog.text
    )


def test_many_short_callbacks_are_not_interrupted() -> None:
    """The loop is busy for longer than the limit, but no single callback is."""

    async def main() -> int:
        count = 0
        end = time.monotonic() + 0.3
        with LoopGuard(lambda: {__name__: "x"}, 0.1, tick_s=0.01).active():
            while time.monotonic() < end:
                count += 1
                await asyncio.sleep(0)
        return count

    assert asyncio.run(main()) > 10


HOLDER = """
import ctypes, sys, threading, time
from pathlib import Path
from pegboard_server import watchdog
from pegboard_server.engine_watch import EngineWatch

sys.path.insert(0, sys.argv[1])
import acme_holder

def serve():
    time.sleep(0.1)
    acme_holder.hold()

EngineWatch(Path(sys.argv[1]) / "heart", {"acme_holder": "sampler:acme (acme 1.0)"}, loop=serve).start()
time.sleep(0.7)  # the thread has armed the dump
serve()
"""  # noqa: E501


def test_a_call_that_holds_the_interpreter_lock_is_told(tmp_path: Path) -> None:
    """No Python code of the engine process can run, so its stacks come from a thread in C."""
    (tmp_path / "acme_holder.py").write_text(
        "import ctypes\ndef hold(): ctypes.PyDLL(None).usleep(600_000_000)\n"
    )
    reader, clock, path = heart(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while not (stacks_of(path).exists() and "in hold" in stacks_of(path).read_text()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert reader.look() == ("", False)
    clock.now += 61
    reason, is_over = reader.look()
    assert reason.startswith(
        "a call into plugin sampler:acme (acme 1.0) has not returned, and does not let other "
        "threads run"
    )
    assert not is_over and "in hold" in reader.stacks


def test_the_innermost_plugin_of_stacks() -> None:
    modules = {"acme_x": "model:x", "acme_run": "executor:run", "acme_y.deep.part": "sampler:y"}
    other = 'Thread 0x1 (most recent call first):\n  File "/site/acme_x/a.py", line 1 in f\n\n'
    main = (
        'Thread 0x2 (most recent call first):\n  File "/lib/threading.py", line 1 in wait\n  File '
        '"/s/acme_run.py", line 2 in g\n'
    )
    assert plugin_in(other + main, modules) == "model:x"
    assert plugin_in(main, modules) == "executor:run" and plugin_in("", modules) is None
    assert (
        plugin_in(
            main + '  File "/s/acme_y/deep/part.py", line 2 in g\n',
            {"acme_y.deep.part": "sampler:y"},
        )
        == "sampler:y"
    )
