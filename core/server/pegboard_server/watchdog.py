"""The watchdog in the API processes: it notices an engine that hangs, and plugin code of a request
that blocks the event loop.

The engine process writes its *heart* twice a second (`engine_watch.py`): a counter, and how long
which call has been running. An API process reads it once a second. After `engine_stall_s`, `GET
/health` and new requests answer 503. After `engine_end_s`, the process that owns the engine ends
it. The same happens if the counter stands still: then the engine process is stopped, or code in it
holds Python's interpreter lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import re
import signal
import sys
import threading
import time
import traceback
from asyncio.events import Handle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.thread import _WorkItem
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec

from pegboard.engine.boundary.client import EngineProcess
from pegboard.errors import PluginFailure, culprit
from pegboard.log import get_logger
from pegboard_server.settings import ServerConfig

log = get_logger(__name__)

BEAT_S = 0.5
"""The time between two beats of the heart."""

SILENT_S = 4 * BEAT_S
"""A heart that has not been written for this long stands still."""

LOOK_S = 1.0
LOG_AFTER_S = 10.0
"""How long a call in the engine may take before the log says so."""

HEART_BYTES = 1024


class Seen(Protocol):
    """An engine that is watched. folder: has its heart. stalled: see `EngineLink`."""

    folder: Path
    stalled: str


class Group(Protocol):
    """Engines that are watched. Their number may change."""

    @property
    def parts(self) -> Sequence[Seen]: ...


class Beat(msgspec.Struct):
    """count: number of the beat. stalled_s: how long the oldest call has been running. what: which
    one."""

    count: int
    stalled_s: float = 0.0
    what: str = ""


def encode_beat(beat: Beat) -> bytes:
    """A beat as JSON of at most HEART_BYTES bytes."""
    beat.what = beat.what[: HEART_BYTES // 8]  # a character has at most six bytes in JSON
    return msgspec.json.encode(beat)


class Heart:
    """Reads the heart of an engine process. A heart that was never written belongs to an engine
    that still loads."""

    def __init__(
        self, path: Path, config: ServerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._stall_s = config.engine_stall_s
        self._end_s = config.engine_end_s
        self._clock = clock
        self._count = 0
        self._seen_s = 0.0
        self.stacks = ""
        """The stacks of the engine's threads, if one of them does not let the others run."""

    def look(self) -> tuple[str, bool]:
        """Return what has hung for too long ("" = nothing), and whether the engine must be
        ended."""
        try:
            beat = msgspec.json.decode(self._path.read_bytes(), type=Beat)
        except (OSError, msgspec.DecodeError):  # not written yet
            return "", False
        now = self._clock()
        if beat.count != self._count:
            self._count = beat.count
            self._seen_s = now
        silent_s = now - self._seen_s
        stalled_s = (
            silent_s + beat.stalled_s
            if silent_s > SILENT_S and beat.stalled_s
            else max(silent_s, beat.stalled_s)
        )
        if stalled_s < self._stall_s:
            return "", False
        self.stacks = ""
        what = beat.what
        if silent_s > SILENT_S:
            what = self._why_silent()
        return f"{what} for {stalled_s:.0f} s", stalled_s >= self._end_s

    def _why_silent(self) -> str:
        path = stacks_of(self._path)
        try:
            self.stacks = path.read_text("utf-8", "replace")
            modules = msgspec.json.decode(
                path.with_suffix(".modules").read_bytes(), type=dict[str, str]
            )
        except (OSError, msgspec.DecodeError):
            modules = {}
        if not self.stacks:
            return "the engine process does not run (it was stopped)"
        plugin = plugin_in(self.stacks, modules)
        where = f"a call into plugin {plugin}" if plugin else "code in the engine process"
        return f"{where} has not returned, and does not let other threads run,"


def plugin_in(stacks: str, modules: Mapping[str, str]) -> str | None:
    """Return the innermost plugin of the stacks that `faulthandler` wrote: of the main thread,
    which comes last, else of another thread. modules: see `culprit`."""
    plugins: list[str] = []
    for thread in reversed(re.split(r"^(?:Current t|T)hread ", stacks, flags=re.M)):
        files = [
            Path(path).with_suffix("").parts
            for path in re.findall(r'^  File "(.*)", line', thread, re.M)
        ]
        names = [".".join(parts[at:]) for parts in files for at in range(len(parts))]
        plugins += filter(None, [culprit(modules, names)])
    return min(plugins, key=lambda plugin: plugin.startswith("executor:"), default=None)


def stacks_of(heart: Path) -> Path:
    """Return the file for the stacks of an engine process that holds the interpreter lock."""
    return heart.with_name(f"{heart.name}.stacks")


def heart_of(folder: Path) -> Path:
    """The heart of the engine process whose sockets are in `folder`."""
    return folder / "heart"


class WatchedEngine(EngineProcess):
    """An engine process that has a heart."""

    def __init__(self, *, role: str = "engine") -> None:
        super().__init__("pegboard_server.engine_watch:build_watched", role=role)

    def start(self, plan: Any, *, wants_samples: bool = False) -> None:
        super().start((plan, str(heart_of(self.folder))), wants_samples=wants_samples)

    def end(self, reason: str) -> None:
        """Kill the process. Everything that waits for it gets `reason`."""
        self.died(f"the engine was ended, because {reason}")
        self._process.kill()


async def watch_engines(engines: Group, config: ServerConfig) -> None:
    """Keep `stalled` of all engines up to date, and end those that hang for too long, if this
    process owns them. Runs until it is cancelled."""
    hearts: dict[Path, Heart] = {}
    while True:
        await asyncio.sleep(LOOK_S)
        for engine in engines.parts:
            heart = hearts.setdefault(engine.folder, Heart(heart_of(engine.folder), config))
            watch_engine(engine, heart)


def watch_engine(engine: Seen, heart: Heart) -> None:
    """Look at the heart of an engine once."""
    reason, is_over = heart.look()
    if bool(reason) != bool(engine.stalled):
        stacks = f"; stacks:\n{heart.stacks}" if heart.stacks else ""
        log.error("the engine is stalled: %s%s", reason, stacks) if reason else log.warning(
            "the engine answers again"
        )
    engine.stalled = reason
    if is_over and isinstance(engine, WatchedEngine):
        engine.end(reason)


# --- loading --------------------------------------------------------------------------------------


@contextlib.contextmanager
def loading_watched(
    modules: Callable[[], Mapping[str, str]], log_after_s: float = LOG_AFTER_S
) -> Iterator[None]:
    """Log, while the block loads a model in this thread, the plugin whose call has not moved for
    `log_after_s` seconds, with its stack. Nothing is ended, because only a person can tell whether
    loading hangs. modules: module → plugin; it is called in another thread, when a call has not
    moved for so long."""
    is_over = threading.Event()
    loader = threading.get_ident()

    def watch() -> None:
        inner: FrameType | None = None
        place = 0
        since = 0.0
        log_at_s = log_after_s
        while not is_over.wait(BEAT_S):
            stack = [frame for frame, _ in traceback.walk_stack(sys._current_frames().get(loader))]
            now = time.monotonic()
            if stack[0] is not inner or inner.f_lasti != place:
                inner = stack[0]
                place = stack[0].f_lasti
                since = now
                log_at_s = log_after_s
            elif now - since >= log_at_s:
                log_at_s *= 2
                names = [str(frame.f_globals.get("__name__", "")) for frame in stack]
                # compilers have their own limit
                if "subprocess" in names or (plugin := culprit(modules(), names)) is None:
                    continue
                message = "".join(traceback.format_stack(stack[0])).rstrip()
                log.warning(
                    "loading: plugin %s has been in the same call for %.0f s:\n%s",
                    plugin,
                    now - since,
                    message,
                )

    threading.Thread(target=watch, name="pegboard-loading", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


# --- the event loop -------------------------------------------------------------------------------

_CALLBACK = Handle._run.__code__
_WORK = _WorkItem.run.__code__


class LoopGuard:
    """Ends plugin code that blocks the event loop of this process, or a thread that works for a
    request, for more than `limit_s` seconds.

    A timer interrupts the main thread twice a second. If the event loop is still in the same
    callback after `limit_s`, and the code of a plugin is on the stack, a PluginFailure is raised
    there, so only that request (or that metrics sink) fails. The timer also interrupts a regular
    expression. A thread gets the PluginFailure when its Python code next goes on. Works only in the
    main thread; elsewhere it does nothing.
    """

    def __init__(
        self, modules: Callable[[], Mapping[str, str]], limit_s: float, *, tick_s: float = 0.5
    ) -> None:
        self._modules = modules
        self._limit_s = limit_s
        self._tick_s = tick_s
        self._callback: FrameType | None = None
        self._since = 0.0
        self._is_told = False
        self._work: dict[int, tuple[FrameType, float]] = {}

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
        self._look_at_threads(now)
        if at is None or at is not self._callback:
            self._callback = at
            self._since = now
            self._is_told = False
            return
        if now - self._since < self._limit_s:
            return
        plugin = culprit(self._modules(), names)
        stack = "".join(traceback.format_stack(frame)).rstrip()
        if plugin is not None:
            log.error(
                "plugin %s blocked the server for %.0f s and is interrupted:\n%s",
                plugin,
                now - self._since,
                stack,
            )
            raise self._too_slow(plugin)
        if not self._is_told:
            self._is_told = True
            log.error("the server has been blocked for %.0f s:\n%s", now - self._since, stack)

    def _too_slow(self, plugin: str) -> PluginFailure:
        return PluginFailure(
            f"plugin {plugin} did not return within {self._limit_s:g} s (plugin_call_s)",
            plugin=plugin,
        )

    def _look_at_threads(self, now: float) -> None:
        """Interrupt plugin code in threads of thread pools. Otherwise a few requests that hang
        would take all threads."""
        before = self._work
        self._work = {}
        for ident, top in sys._current_frames().items():
            names: list[str] = []
            at: FrameType | None = top
            while at is not None and at.f_code is not _WORK:
                names.append(str(at.f_globals.get("__name__", "")))
                at = at.f_back
            if at is None:
                continue
            work, since = before.get(ident, (at, now))
            since = since if work is at else now
            if (
                now - since >= self._limit_s
                and (plugin := culprit(self._modules(), names)) is not None
            ):
                stack = "".join(traceback.format_stack(top)).rstrip()
                log.error(
                    "plugin %s blocked a thread for %.0f s and is interrupted:\n%s",
                    plugin,
                    now - since,
                    stack,
                )
                _raise_in(ident, self._too_slow(plugin))
                since = now
            self._work[ident] = at, since


def _raise_in(thread: int, failure: PluginFailure) -> None:
    """Raise the failure in another thread. Python takes a class and makes the instance itself."""
    fields = {
        "__init__": lambda self: PluginFailure.__init__(self, str(failure), plugin=failure.plugin)
    }
    raised = ctypes.py_object(type("PluginFailure", (PluginFailure,), fields))
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
