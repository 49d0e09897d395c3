"""Compiles constraints in threads, outside the engine's loop. Each constraint is compiled once, within a time limit, by the first
backend that can.

A thread cannot be stopped. A thread that exceeds the time limit is replaced, and it ends when its compilation ends. So a
constraint that never compiles fails its own requests and costs the engine one thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue

from pegboard.errors import PegboardError, RequestError, blame
from pegboard.interfaces.structured_output import Constraint, Grammar, StructuredOutput
from pegboard.log import get_logger

log = get_logger(__name__)

MAX_CACHED = 256
"""The number of compiled constraints that are kept, including failed ones. The least recently used one is dropped first."""

MAX_CHECKED = 64 * 1024
"""Constraints with more characters are not checked on the engine's thread."""

MAX_THREADS = 8
"""The maximum number of threads, including those that have exceeded the time limit."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled constraint and the backend that compiled it."""

    name: str
    backend: StructuredOutput
    grammar: Grammar


@dataclass(slots=True)
class _Compilation:
    """A constraint that is being compiled. deadline_s: on the compiler's clock. is_overdue: its thread has already been
    replaced."""

    constraint: Constraint
    deadline_s: float
    future: Future[Compiled] = field(default_factory=Future)
    is_overdue: bool = False


class GrammarCompiler:
    """chain: backends by name, asked in order.

    Only the engine's thread may call `start` and `get`."""

    def __init__(
        self,
        chain: Mapping[str, StructuredOutput],
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        num_threads: int = 2,
    ) -> None:
        self._chain = chain
        self._timeout_s = timeout_s
        self._clock = clock
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[_Compilation | None] = SimpleQueue()
        self._cache: OrderedDict[Constraint, _Compilation] = OrderedDict()

    def check(self, constraint: Constraint) -> None:
        """Raise RequestError, with every backend's reason, if no backend can enforce the constraint. Very long constraints are
        checked only by the thread that compiles them."""
        if len(constraint.text) > MAX_CHECKED:
            return
        reasons = []
        for name, backend in self._chain.items():
            if (reason := _rejection(name, backend, constraint)) is None:
                return
            reasons.append(f"{name}: {reason}")
        raise _cannot(constraint, reasons)

    def start(self, constraint: Constraint) -> None:
        """Start to compile the constraint, unless that is done or under way."""
        if constraint not in self._cache:
            self._begin(constraint)
        self._cache.move_to_end(constraint)

    def get(self, constraint: Constraint) -> Compiled | None:
        """Return the result, or None while the constraint is being compiled. Raises PegboardError if compiling failed or takes
        too long."""
        compilation = self._cache.get(constraint)
        if compilation is None:  # it fell out of the cache while its request waited
            compilation = self._begin(constraint)
        if compilation.future.done():
            try:
                return compilation.future.result()
            except PegboardError as error:
                raise error.with_traceback(None) from None  # the error is kept for later requests; its traceback would grow
        if self._clock() <= compilation.deadline_s:
            return None
        if not compilation.is_overdue:
            compilation.is_overdue = True
            self._add_thread()
        raise RequestError(
            f"compiling the {constraint.kind} constraint took over {self._timeout_s:g} s; simplify it",
            parameter="structured_outputs",
        )

    def wait(self, timeout_s: float) -> None:
        """Sleep until a compilation ends, at most `timeout_s`. The engine calls this when it has nothing else to do."""
        pending = [entry.future for entry in self._cache.values() if not entry.future.done() and not entry.is_overdue]
        if pending:
            wait(pending, timeout_s, FIRST_COMPLETED)

    def stop(self) -> None:
        """End the threads. Idle threads end now, the others when their compilation ends. The call waits for one second at
        most."""
        for _ in self._threads:
            self._queue.put(None)
        give_up_s = time.monotonic() + 1.0
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection in such a thread can stop the engine
                thread.join(max(0.0, give_up_s - time.monotonic()))

    def _begin(self, constraint: Constraint) -> _Compilation:
        compilation = _Compilation(constraint, self._clock() + self._timeout_s)
        self._cache[constraint] = compilation
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        if len(self._threads) < self._num_threads:
            self._add_thread()
        self._queue.put(compilation)
        return compilation

    def _add_thread(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) < MAX_THREADS:
            thread = threading.Thread(target=self._work, name="grammar", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (compilation := self._queue.get()) is not None:
            try:
                compilation.future.set_result(self._compile(compilation.constraint))
            except BaseException as error:  # noqa: BLE001 - `get` raises it
                compilation.future.set_exception(error)
            if compilation.is_overdue:
                return

    def _compile(self, constraint: Constraint) -> Compiled:
        started = time.perf_counter()
        reasons: list[str] = []
        for name, backend in self._chain.items():
            reason = _rejection(name, backend, constraint)
            if reason is None:
                try:
                    with blame(name):
                        grammar = backend.compile(constraint)
                except PegboardError as error:  # another backend may be able to compile it
                    reason = str(error)
                else:
                    why = f"; not {'; '.join(reasons)}" if reasons else ""
                    seconds = time.perf_counter() - started
                    log.info("structured_output %s → %s  (compiled in %.3f s%s)", constraint.kind, name, seconds, why)
                    return Compiled(name, backend, grammar)
            reasons.append(f"{name}: {reason}")
        raise _cannot(constraint, reasons)


def _rejection(name: str, backend: StructuredOutput, constraint: Constraint) -> str | None:
    with blame(name):
        return backend.reject(constraint)


def _cannot(constraint: Constraint, reasons: list[str]) -> RequestError:
    why = "; ".join(reasons) or "no structured output plugin is active"
    return RequestError(f"the {constraint.kind} constraint cannot be enforced ({why})", parameter="structured_outputs")
