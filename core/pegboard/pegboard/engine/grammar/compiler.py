"""Compiles constraints in threads, outside the engine's loop. Each constraint is compiled once,
within a time limit, by the first backend that can.

Small constraints have a thread of their own, so large ones do not delay them. Clients take turns,
with the shortest constraint first, and one client cannot take all threads. A compilation that
nobody waits for any more is not begun. A thread cannot be stopped, so backends refuse what would
take long. A thread that takes long nevertheless gets the lowest priority and is replaced, and it
ends when its compilation ends.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field

from pegboard.engine.grammar.request_grammar import BUSY, Blaming
from pegboard.errors import PegboardError, PluginFailure, RequestError, blame, expect
from pegboard.interfaces.structured_output import Constraint, Grammar, StructuredOutput
from pegboard.log import get_logger

log = get_logger(__name__)

MAX_CACHED = 256
"""The number of compiled constraints that are kept, including failed ones. The least recently used
one is dropped first."""

MAX_CACHED_CHARACTERS = 512 * 1024
"""The total length of the constraints that are kept. The memory of a compiled constraint grows with
its length."""

SMALL = 8 * 1024
"""Constraints with more characters are not checked on the engine's thread, and have a compiling
thread of their own."""

PATIENCE_S = 5.0
"""Seconds after which a compilation goes on with the lowest priority, and the constraints after it
get another thread."""

MAX_OVERDUE = 3
"""The number of threads that may be replaced, for small and for large constraints."""

_clock_of_thread: Callable[[int], int] = getattr(
    time, "pthread_getcpuclockid", lambda _: time.CLOCK_MONOTONIC
)
"""Without such clocks, as on macOS, the whole time counts."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled constraint and the backend that compiled it."""

    name: str
    backend: StructuredOutput
    grammar: Grammar


@dataclass(slots=True, eq=False)
class Compilation:
    """A constraint that waits for a thread, is being compiled, or is compiled. users: say whether
    those who asked for it still want it. client: the first of them. started_s: on the compiler's
    clock. thread: its native id. thread_clock: that of its processor time. used_s: what that showed
    at the start. is_overdue: the time limit is exceeded. is_replaced: another thread took over."""

    constraint: Constraint
    client: str
    users: list[Callable[[], bool]] = field(default_factory=list)
    future: Future[Compiled] = field(default_factory=Future)
    started_s: float = 0.0
    thread: int = 0
    thread_clock: int = 0
    used_s: float = 0.0
    is_overdue: bool = False
    is_replaced: bool = False


@dataclass(slots=True, eq=False)
class _Lane:
    """What waits for the threads of this lane, oldest first, and what they compile now. changed:
    guards both lists, and tells the threads about new work."""

    waiting: list[Compilation] = field(default_factory=list)
    running: list[Compilation] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_stopped: bool = False

    def next(self) -> Compilation | None:
        """Return what to compile next, or None if there is nothing for now: first for the client
        with the fewest running compilations, then the shortest. The last thread is for a client
        that has none of the others."""
        for compilation in [
            entry for entry in self.waiting if not any(wants() for wants in entry.users)
        ]:
            self.waiting.remove(compilation)
            compilation.future.cancel()
        running = Counter(entry.client for entry in self.running)
        able = [entry for entry in self.waiting if running[entry.client] < MAX_OVERDUE]
        return min(
            able,
            key=lambda entry: (running[entry.client], len(entry.constraint.text)),
            default=None,
        )


class GrammarCompiler:
    """chain: backends by name, asked in order. Only the engine's thread may call the public
    methods."""

    def __init__(
        self,
        chain: Mapping[str, StructuredOutput],
        *,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        blaming: Blaming = blame,
    ) -> None:
        self.chain = chain
        self.blame = blaming
        self._timeout_s = timeout_s
        self._clock = clock
        self._threads: list[threading.Thread] = []
        self._lanes = (_Lane(), _Lane())
        self._cache: OrderedDict[Constraint, Compilation] = OrderedDict()
        self._failures: dict[tuple[Constraint, str], str] = {}

    def check(self, constraint: Constraint) -> None:
        """Raise RequestError, with every backend's reason, if no backend can enforce the
        constraint. Long constraints are checked only by the thread that compiles them."""
        if len(constraint.text) > SMALL:
            return
        reasons = []
        for name in self.chain:
            if (reason := self._rejection(name, constraint)) is None:
                return
            reasons.append(f"{name}: {reason}")
        raise _cannot(constraint, reasons)

    def start(
        self, constraint: Constraint, is_wanted: Callable[[], bool] = lambda: True, client: str = ""
    ) -> Compilation:
        """Start to compile the constraint, unless that is done or under way. `get` returns the
        result. client: who asks."""
        compilation = self._cache.get(constraint)
        if compilation is None or compilation.future.cancelled():
            compilation = self._cache[constraint] = Compilation(constraint, client, [is_wanted])
            self._put(compilation)
        elif not compilation.future.done():
            compilation.users.append(is_wanted)
        self._cache.move_to_end(constraint)
        return compilation

    def get(self, compilation: Compilation) -> Compiled | None:
        """Return the result, or None while the constraint is being compiled. Raises PegboardError
        if compiling failed or takes too long."""
        # it was given up just before another request asked for it
        if compilation.future.cancelled():
            self._put(compilation)
        if compilation.future.done():
            try:
                return compilation.future.result()
            except PegboardError as error:
                # the error is kept for later requests; its traceback would grow
                raise error.with_traceback(None) from None
        self._replace_overdue()
        kind = compilation.constraint.kind
        limit = f"took over {self._timeout_s:g} s"
        if compilation.is_overdue:
            raise RequestError(
                f"compiling the {kind} constraint {limit}; simplify it",
                parameter="structured_outputs",
            )
        clients = [entry.client for entry in self._lane(compilation).running if entry.is_overdue]
        if len(clients) > MAX_OVERDUE or clients.count(compilation.client) == MAX_OVERDUE:
            raise RequestError(
                f"the {kind} constraint waits for others that {limit}; try later",
                parameter="structured_outputs",
            )
        return None

    def distrust(self, constraint: Constraint, name: str, error: Exception) -> None:
        """Never ask a backend for this constraint again, because it raised an error while it
        enforced it."""
        log.warning(
            "structured_output %s failed and is not used again for this constraint",
            name,
            exc_info=error,
        )
        self._failures[constraint, name] = str(error)
        if len(self._failures) > MAX_CACHED:
            del self._failures[next(iter(self._failures))]
        self._cache.pop(constraint, None)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a compilation ends, at most `timeout_s`. The engine calls this when it has
        nothing else to do."""
        pending = [
            entry.future
            for entry in self._cache.values()
            if not entry.future.done() and not entry.is_overdue
        ]
        if pending:
            wait(pending, timeout_s, FIRST_COMPLETED)

    def stop(self) -> None:
        """End the threads. Idle threads end now, the others when their compilation ends. The call
        waits for one second at most."""
        for lane in self._lanes:
            with lane.changed:
                lane.is_stopped = True
                lane.changed.notify_all()
        give_up_s = time.monotonic() + 1.0
        for thread in self._threads:
            # garbage collection in such a thread can stop the engine
            if thread is not threading.current_thread():
                thread.join(max(0.0, give_up_s - time.monotonic()))

    def _put(self, compilation: Compilation) -> None:
        """Queue the compilation. Drop results that have not been used for long if there are too
        many."""
        compilation.future = Future()
        if not self._threads:
            for lane in self._lanes:
                self._add_thread(lane)
        size = sum(len(constraint.text) for constraint in self._cache)
        for constraint, old in list(self._cache.items()):
            if (
                len(self._cache) > MAX_CACHED or size > MAX_CACHED_CHARACTERS
            ) and old.future.done():
                del self._cache[constraint]
                size -= len(constraint.text)
        self._replace_overdue()
        lane = self._lane(compilation)
        with lane.changed:
            lane.waiting.append(compilation)
            lane.changed.notify()

    def _lane(self, compilation: Compilation) -> _Lane:
        return self._lanes[len(compilation.constraint.text) > SMALL]

    def _replace_overdue(self) -> None:
        for lane in self._lanes:
            with lane.changed:  # so no thread ends meanwhile
                for entry in lane.running:
                    seconds = self._clock() - entry.started_s
                    used_s = time.clock_gettime(entry.thread_clock) - entry.used_s
                    entry.is_overdue = max(used_s, seconds / BUSY) > self._timeout_s
                    if (
                        seconds > min(PATIENCE_S, self._timeout_s)
                        and not entry.is_replaced
                        and len(lane.running) <= MAX_OVERDUE
                    ):
                        entry.is_replaced = True
                        with suppress(OSError):  # not on every system
                            # on Linux, a priority belongs to a thread
                            os.setpriority(os.PRIO_PROCESS, entry.thread, 19)
                        self._add_thread(lane)

    def _add_thread(self, lane: _Lane) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._work, args=[lane], name="grammar", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _take(self, lane: _Lane) -> Compilation | None:
        """Wait for a compilation and begin it. Returns None when the compiler stops."""
        with lane.changed:
            while not lane.is_stopped:
                if (compilation := lane.next()) is not None:
                    compilation.thread_clock = clock = _clock_of_thread(threading.get_ident())
                    compilation.started_s = self._clock()
                    compilation.used_s = time.clock_gettime(clock)
                    compilation.thread = threading.get_native_id()
                    lane.waiting.remove(compilation)
                    lane.running.append(compilation)
                    return compilation
                lane.changed.wait()
        return None

    def _work(self, lane: _Lane) -> None:
        while (compilation := self._take(lane)) is not None:
            try:
                compilation.future.set_result(self._compile(compilation.constraint))
            except BaseException as error:  # noqa: BLE001 - `get` raises it
                compilation.future.set_exception(error)
            compilation.users.clear()
            with lane.changed:
                lane.running.remove(compilation)
                lane.changed.notify()  # the client may have waited for its turn
            if lane is self._lanes[1]:
                give_back_memory()
            if compilation.is_replaced:
                return

    def _compile(self, constraint: Constraint) -> Compiled:
        started = time.perf_counter()
        reasons: list[str] = []
        for name, backend in self.chain.items():
            reason = self._rejection(name, constraint)
            if reason is None:
                try:
                    with self.blame(name):
                        grammar = expect(backend.compile(constraint), Grammar, backend, "compile")
                except PegboardError as error:  # another backend may be able to compile it
                    reason = _reason(name, error)
                else:
                    why = f"; not {'; '.join(reasons)}" if reasons else ""
                    seconds = time.perf_counter() - started
                    log.info(
                        "structured_output %s → %s  (compiled in %.3f s%s)",
                        constraint.kind,
                        name,
                        seconds,
                        why,
                    )
                    return Compiled(name, backend, grammar)
            reasons.append(f"{name}: {reason}")
        raise _cannot(constraint, reasons)

    def _rejection(self, name: str, constraint: Constraint) -> str | None:
        """Return the backend's reason against the constraint, or how it failed for it before."""
        if (failure := self._failures.get((constraint, name))) is not None:
            return failure
        try:
            with self.blame(name):
                reason: str | None = expect(
                    self.chain[name].reject(constraint), str | None, self.chain[name], "reject"
                )
                return reason
        except PegboardError as error:
            return _reason(name, error)


def give_back_memory() -> None:
    """Make glibc return freed memory to the system. Compiling a large constraint takes up to 100
    MiB, which glibc would keep."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _reason(name: str, error: PegboardError) -> str:
    """Return the error as a reason. An error that the backend should not have raised is also
    logged."""
    if isinstance(error, PluginFailure):
        log.warning("structured_output %s cannot compile a constraint", name, exc_info=error)
    return str(error)


def _cannot(constraint: Constraint, reasons: list[str]) -> RequestError:
    why = "; ".join(reasons)
    return RequestError(
        f"the {constraint.kind} constraint cannot be enforced ({why})",
        parameter="structured_outputs",
    )
