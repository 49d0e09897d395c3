"""The watchdog in the API processes: it notices an engine that hangs, and plugin code of a request that blocks the event loop.

The engine process writes its *heart* twice a second (`engine_watch.py`): a counter, and how long which call has been running. An
API process reads it once a second. After `engine_stall_s`, `GET /health` and new requests answer 503. After `engine_end_s`, the
process that owns the engine ends it. A counter that stands still has the same consequences: the engine process is stopped, or
code in it holds Python's interpreter lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
import traceback
from asyncio.events import Handle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from pegboard.config.schema import ServerConfig
from pegboard.engine.boundary.client import EngineLink, EngineProcess
from pegboard.errors import PluginFailure, culprit
from pegboard.log import get_logger

log = get_logger(__name__)

BEAT_S = 0.5
"""The time between two beats of the heart."""

LOOK_S = 1.0
LOG_AFTER_S = 10.0
"""How long a call in the engine may take before the log says so."""

HEART_BYTES = 1024


class Beat(msgspec.Struct):
    """count: number of the beat. stalled_s: how long the oldest call has been running. what: which one."""

    count: int
    stalled_s: float = 0.0
    what: str = ""


def encode_beat(beat: Beat) -> bytes:
    """A beat as JSON of at most HEART_BYTES bytes."""
    beat.what = beat.what[: HEART_BYTES // 8]  # a character has at most six bytes in JSON
    return msgspec.json.encode(beat)


class Heart:
    """Reads the heart of an engine process. A heart that was never written belongs to an engine that still loads."""

    def __init__(self, path: Path, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._stall_s, self._end_s = config.engine_stall_s, config.engine_end_s
        self._clock = clock
        self._count = 0
        self._seen_s = 0.0

    def look(self) -> tuple[str, bool]:
        """Return what has hung for too long ("" = nothing), and whether the engine must be ended."""
        try:
            beat = msgspec.json.decode(self._path.read_bytes(), type=Beat)
        except (OSError, msgspec.DecodeError):  # not written yet
            return "", False
        now = self._clock()
        if beat.count != self._count:
            self._count, self._seen_s = beat.count, now
        silent_s = now - self._seen_s
        stalled_s = silent_s + beat.stalled_s if silent_s > 4 * BEAT_S and beat.stalled_s else max(silent_s, beat.stalled_s)
        if stalled_s < self._stall_s:
            return "", False
        if silent_s > 4 * BEAT_S:
            what = "the engine process does not run (it was stopped, or code in it does not let other threads run)"
        else:
            what = beat.what
        return f"{what} for {stalled_s:.0f} s", stalled_s >= self._end_s


def heart_of(folder: Path) -> Path:
    """The heart of the engine process whose sockets are in `folder`."""
    return folder / "heart"


class WatchedEngine(EngineProcess):
    """An engine process that has a heart."""

    def __init__(self) -> None:
        super().__init__("pegboard_server.engine_watch:build_watched")

    def start(self, plan: Any, *, wants_samples: bool = False) -> None:
        super().start((plan, str(heart_of(self.folder))), wants_samples=wants_samples)

    def end(self, reason: str) -> None:
        """Kill the process. Everything that waits for it gets `reason`."""
        self._died(f"the engine was ended, because {reason}")
        self._process.kill()


async def watch_engine(engine: EngineLink, heart: Heart) -> None:
    """Keep `engine.stalled` up to date, and end the engine if this process owns it. Runs until it is cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        reason, is_over = heart.look()
        if bool(reason) != bool(engine.stalled):
            log.error("the engine is stalled: %s", reason) if reason else log.warning("the engine answers again")
        engine.stalled = reason
        if is_over and isinstance(engine, WatchedEngine):
            engine.end(reason)
            return


# --- the event loop -----------------------------------------------------------------------------------------------------------

_CALLBACK = Handle._run.__code__


class LoopGuard:
    """Ends plugin code that blocks the event loop of this process for more than `limit_s` seconds.

    A timer interrupts the main thread twice a second. If the event loop is still in the same callback after `limit_s`, and the
    code of a plugin is on the stack, a PluginFailure is raised there, so only that request (or that metrics sink) fails. The
    timer also interrupts a regular expression. Works only in the main thread; elsewhere it does nothing.
    """

    def __init__(self, modules: Callable[[], Mapping[str, str]], limit_s: float, *, tick_s: float = 0.5) -> None:
        self._modules = modules
        self._limit_s = limit_s
        self._tick_s = tick_s
        self._callback: FrameType | None = None
        self._since = 0.0
        self._is_told = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Guard the running loop in the block."""
        if not self._limit_s or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, self._tick)
        signal.setitimer(signal.ITIMER_REAL, self._tick_s, self._tick_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            self._callback = None

    def _tick(self, number: int, frame: FrameType | None) -> None:
        names: list[str] = []
        at = frame
        while at is not None and at.f_code is not _CALLBACK:
            names.append(str(at.f_globals.get("__name__", "")))
            at = at.f_back
        now = time.monotonic()
        if at is None or at is not self._callback:
            self._callback, self._since, self._is_told = at, now, False
            return
        if now - self._since < self._limit_s:
            return
        plugin = culprit(self._modules(), names)
        stack = "".join(traceback.format_stack(frame)).rstrip()
        if plugin is not None:
            log.error("plugin %s blocked the server for %.0f s and is interrupted:\n%s", plugin, now - self._since, stack)
            raise PluginFailure(f"plugin {plugin} did not return within {self._limit_s:g} s (plugin_call_s)", plugin=plugin)
        if not self._is_told:
            self._is_told = True
            log.error("the server has been blocked for %.0f s:\n%s", now - self._since, stack)
