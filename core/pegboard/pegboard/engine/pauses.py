"""Pauses of the engine: what becomes of its requests, and which memory the workers give up
meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

from pegboard.data.request import EngineRequest
from pegboard.engine.queues import Queues
from pegboard.engine.scheduler import Scheduler
from pegboard.errors import RequestError

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of the requests that the engine has: they end with finish reason "abort", they run
to their end, or they stop and go on after the pause."""

TAGS = ("weights", "kv_cache")
"""The parts of the memory that sleep releases."""


class Pauses:
    """mode: of the current pause; None = the engine serves. held: requests that have arrived since
    the pause began, by id. is_sleeping: the pause is a sleep. asleep: the tags of the released
    memory.

    enter: queues a request. finish_steps: ends the steps in flight. reset: drops the prefix cache
    and the blocks of all requests; False = transfers are open. call: calls a method of all workers.
    report: publishes the level of the sleep, None = awake. can_sleep: `enable_sleep_mode` is set.
    """

    def __init__(
        self,
        queues: Queues,
        scheduler: Scheduler,
        *,
        enter: Callable[[EngineRequest], None],
        finish_steps: Callable[[], None],
        reset: Callable[[bool], bool],
        call: Callable[..., object],
        report: Callable[[int | None], None],
        can_sleep: bool,
    ) -> None:
        self._queues = queues
        self._scheduler = scheduler
        self._enter = enter
        self._finish_steps = finish_steps
        self._reset = reset
        self._call = call
        self._report = report
        self._can_sleep = can_sleep
        self.mode: PauseMode | None = None
        self.held: dict[str, EngineRequest] = {}
        self.is_sleeping = False
        self.asleep: list[str] = []

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> bool:
        """Compute nothing until `resume`; requests that arrive wait. clear_cache: also drop the
        prefix cache, so that kept requests compute their tokens again. Return False while requests
        still run to their end or KV transfers are open: steps go on, and the call must be
        repeated."""
        if mode not in get_args(PauseMode):
            raise RequestError(
                f"mode must be one of {', '.join(get_args(PauseMode))}, got {mode!r}",
                parameter="mode",
            )
        self.mode = mode
        self._scheduler.is_paused = mode == "keep"
        if mode == "abort":
            for request in list(self._queues.requests.values()):
                self._queues.fail(request, "abort")
        if mode == "wait" and self._queues.requests:
            return False
        self._finish_steps()
        return not clear_cache or self._reset(True)

    def resume(self) -> None:
        """Serve again, first the requests that have waited. Raises RequestError while the engine
        sleeps."""
        if self.is_sleeping:
            raise RequestError("the engine sleeps; wake it with wake_up")
        self.mode = None
        self._scheduler.is_paused = False
        held = self.held
        self.held = {}
        for request in held.values():
            self._enter(request)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> bool:
        """Pause as `pause` does, and release memory. level 0: none; 1: the KV cache, and the
        weights after they were saved; 2: both, and the weights are read from the checkpoint again.
        Return False as `pause` does."""
        if level not in (0, 1, 2):
            raise RequestError(f"level must be 0, 1 or 2, got {level!r}", parameter="level")
        if level and not self._can_sleep:
            raise RequestError(
                "the engine was started without enable_sleep_mode; only level 0 is possible",
                parameter="level",
            )
        if self.is_sleeping:
            raise RequestError("the engine sleeps already; wake it with wake_up")
        if not self.pause(mode, clear_cache=level > 0):
            return False
        if level:
            try:
                self._call("sleep", level)
            except BaseException:
                self.resume()  # the workers have all their memory
                raise
            self.asleep = list(TAGS)
        self.is_sleeping = True
        self._report(level)
        return True

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Take the memory with these tags again; None = all. When the last part is back, the engine
        serves again. Return whether it does. Does nothing if the engine does not sleep."""
        known = (*TAGS, "scheduling")
        if unknown := [tag for tag in tags or () if tag not in known]:
            raise RequestError(
                f"unknown tag {unknown[0]!r}; there are {', '.join(known)}", parameter="tags"
            )
        waking = [tag for tag in self.asleep if tags is None or tag in tags]
        if waking:
            self._call("wake_up", waking)
            self.asleep = [tag for tag in self.asleep if tag not in waking]
        if self.is_sleeping and not self.asleep:
            self.is_sleeping = False
            self._report(None)
            self.resume()
        return self.mode is None
