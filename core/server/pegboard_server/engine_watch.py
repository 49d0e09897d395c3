"""The watchdog in the engine process: a thread that notices a call that does not return, and writes
it to a small file, the *heart*.

It costs the engine nothing: it looks at the stack of the engine's thread twice a second. A call has
hung if the same frame is on the stack again and again. The plugin is the one whose code is
innermost. Loading the model and idle waiting do not count.

C code that does not release Python's interpreter lock stops this thread, too. Then `faulthandler`
writes all stacks to a file, in which the API process finds the plugin.

This module imports torch through `build_engine`. The reader of the heart is in `watchdog.py`.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from pegboard.engine.boundary import process
from pegboard.engine.build import build_engine
from pegboard.errors import culprit
from pegboard.log import get_logger
from pegboard.plugins.registry import Registry
from pegboard_server.memory import few_arenas
from pegboard_server.settings import ServerConfig
from pegboard_server.watchdog import (
    BEAT_S,
    HEART_BYTES,
    LOG_AFTER_S,
    SILENT_S,
    Beat,
    encode_beat,
    loading_watched,
    stacks_of,
)

if TYPE_CHECKING:
    from pegboard.engine.engine import Engine
    from pegboard.plan.engine_plan import EnginePlan

log = get_logger(__name__)


def build_watched(watched: "tuple[EnginePlan, str]") -> "Engine":
    """Build the engine of a plan, and start the thread that watches it. The second value is the
    path of the heart."""
    plan, heart = watched
    few_arenas()
    with loading_watched(lambda: Registry.from_lock(plan.lock).modules()):
        engine = build_engine(plan)
    log_after_s = min(LOG_AFTER_S, plan.settings.section(ServerConfig).engine_stall_s)
    EngineWatch(
        Path(heart), engine._life.modules, lambda: open_transfers(engine), log_after_s=log_after_s
    ).start()
    return engine


def open_transfers(engine: "Engine") -> dict[object, str]:
    """Return the KV transfers that the engine waits for: a key → what the log calls it."""
    connectors = engine._live.connectors
    names = ", ".join(connectors._connectors)
    transfers: dict[object, str] = {
        key: f"KV connector {names} has not reported the load of {key}"
        for key in list(connectors.loading)
    }
    transfers |= {
        pin: f"KV connector {pin[0]} has not reported the save of {pin[1]}"
        for pin in list(connectors._pins)
    }
    return transfers


class EngineWatch:
    """modules: module → plugin, see `culprit`. transfers: what the engine waits for between steps.
    loop: the function whose callees are watched."""

    def __init__(
        self,
        heart: Path,
        modules: Mapping[str, str],
        transfers: Callable[[], Mapping[object, str]] = dict,
        *,
        log_after_s: float = LOG_AFTER_S,
        loop: Callable[..., object] = process._serve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heart = heart
        self._file = os.open(heart, os.O_CREAT | os.O_WRONLY, 0o600)
        self._modules = modules
        self._transfers = transfers
        self._log_after_s = self._log_at_s = log_after_s
        self._loop = loop.__code__
        self._clock = clock
        self._thread = threading.main_thread().ident
        self._count = 0
        self._call: FrameType | None = None
        self._since = 0.0
        self._open: dict[object, float] = {}

    def start(self) -> None:
        """Write the first beat and start the thread."""
        stacks_of(self._heart).with_suffix(".modules").write_bytes(
            msgspec.json.encode(dict(self._modules))
        )
        self._dump = os.open(stacks_of(self._heart), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.beat()
        threading.Thread(target=self._run, name="pegboard-watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                self.beat()
                if os.fstat(self._dump).st_size:
                    os.ftruncate(self._dump, 0)
                # a thread in C, which needs no interpreter lock
                faulthandler.dump_traceback_later(SILENT_S, file=self._dump)
            except Exception:  # the engine must not suffer from the watchdog
                log.exception("the watchdog failed, so a hang of the engine is no longer explained")
                return

    def beat(self) -> Beat:
        """Look at the engine once, and write what was seen."""
        now = self._clock()
        call = self._current_call()
        if call is not self._call:
            self._call = call
            self._since = now
        stalled_s, what = (now - self._since, "") if call is not None else (0.0, "")
        transfers = self._transfers()
        self._open = {key: self._open.get(key, now) for key in transfers}
        key = min(self._open, key=self._open.__getitem__, default=None)
        if key is not None and now - self._open[key] > stalled_s:
            stalled_s = now - self._open[key]
            what = transfers[key]
        if stalled_s < self._log_after_s:
            self._log_at_s = self._log_after_s
        elif not what:
            plugin = self._culprit()
            what = (
                f"a call into plugin {plugin} has not returned"
                if plugin
                else "a step has not returned"
            )
        if stalled_s >= self._log_at_s:
            self._log_at_s = 2 * stalled_s
            log.warning("%s for %.0f s; stacks:\n%s", what, stalled_s, "\n".join(self._stacks()))
        self._count += 1
        beat = Beat(self._count, stalled_s, what)
        os.pwrite(self._file, encode_beat(beat).ljust(HEART_BYTES), 0)
        return beat

    def _current_call(self) -> FrameType | None:
        """Return the frame that the engine's loop has called, or None while the loop waits for
        messages."""
        inner: FrameType | None = None
        for frame in _outward(sys._current_frames().get(self._thread or 0)):
            if frame.f_code is self._loop:
                return None if inner is None or _module(inner).startswith("zmq") else inner
            inner = frame
        return None

    def _culprit(self) -> str | None:
        """Return the plugin whose code runs in the engine's thread. If an executor waits there for
        a step in another thread, return the plugin that runs in that thread."""
        stacks = {
            ident: [_module(frame) for frame in _outward(top)]
            for ident, top in sys._current_frames().items()
        }
        main = stacks.pop(self._thread or 0, [])
        steps = [
            names
            for names in stacks.values()
            if any(name.startswith("pegboard.worker.") for name in names)
        ]
        plugins = [plugin for names in (main, *steps) if (plugin := culprit(self._modules, names))]
        return min(plugins, key=lambda plugin: plugin.startswith("executor:"), default=None)

    def _stacks(self) -> Iterator[str]:
        this_thread = threading.get_ident()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, top in sys._current_frames().items():
            modules = [_module(frame) for frame in _outward(top)]
            if ident == self._thread or (
                ident != this_thread
                and any(name.startswith("pegboard.worker.") for name in modules)
            ):
                yield (
                    "thread "
                    f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(top)).rstrip()}"
                )


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
