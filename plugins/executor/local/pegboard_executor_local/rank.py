"""The process of one rank: a worker that does what the messages of the engine's process say.

It has one thread. A step is answered when its result is there. If the device computes
asynchronously, the next step is started first, so that the device never waits for a message.
"""

from __future__ import annotations

import pickle
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from pegboard.data.batch import StepOutput, TokenMasks
from pegboard.interfaces.executor import WorkerLike
from pegboard.log import get_logger
from pegboard_executor_local.link import Link, LinkClosed
from pegboard_executors.answers import answer_of, error_of, result_of

log = get_logger(__name__)

QUICK_S = 0.00005
"""A result that comes within these seconds was there before it was waited for."""

LOOK_AHEAD_S = 0.001
"""How many seconds a rank waits for the next step, at most, before it waits for a result."""


def main(fd: int) -> None:
    """The body of the process. fd: of its end of the socket. It ends when the other end is closed,
    and on SIGUSR1. SIGTERM stays blocked, because the engine's process decides when to stop."""
    signal.signal(signal.SIGUSR1, _leave)
    end = socket.socket(fileno=fd)
    end.set_inheritable(False)
    Rank(Link(end)).run()


def _leave(*_: object) -> NoReturn:
    sys.exit(0)


class Rank:
    """Answers messages in the order in which they come:

        ("start", make_worker, Place, sampling)    → WorkerReady
        ("step", Batch)                            → StepOutput
        ("call", method, arguments …)              → what the worker returns

    An answer is (kind, value). kind: "answer", "transfers" (the reports of a rank that does not
    answer steps) or "error". Masks are messages of their own. kept: messages that came while masks
    were awaited. started: the number of each step that is not answered, and what waits for its
    result."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.worker: WorkerLike | None = None
        self.kept: deque[tuple[int, bytearray]] = deque()
        self.masks: dict[int, TokenMasks] = {}
        self.started: deque[tuple[int, Callable[[], StepOutput]]] = deque()
        self.samples = False
        self.answers = False
        self.last_wait_s = LOOK_AHEAD_S

    def run(self) -> None:
        """Work until the other end is closed."""
        try:
            while True:
                while self.started and not self._starts_next():
                    self._finish_oldest()
                self._handle(*(self.kept.popleft() if self.kept else self._receive()))
        except LinkClosed:
            log.debug("the engine has closed the link")
        finally:
            if self.worker is not None:
                self.worker.stop()

    def _starts_next(self) -> bool:
        """Whether to start the next step before the last one is answered: it is there, or it comes
        soon, and results are waited for. A worker that computes in `run` answers at once."""
        if self.last_wait_s < QUICK_S:
            return False
        # results are not late if this takes less time than the device
        soon_s = min(self.last_wait_s / 2, LOOK_AHEAD_S)
        return bool(self.kept) or self.link.has_message(soon_s)

    def _receive(self) -> tuple[int, bytearray]:
        """Return the next message that a rank answers. Masks are put aside."""
        while True:
            number, message = self.link.receive()
            if number:
                return number, message
            step, masks = pickle.loads(message)
            self.masks[step] = masks

    def _handle(self, number: int, message: bytearray) -> None:
        try:
            kind, *values = pickle.loads(message)
            if kind == "step":
                (batch,) = values
                needs_masks = batch.needs_masks and self.samples
                masks = (lambda: self._masks_of(batch.step)) if needs_masks else None
                self.started.append((number, self._worker.run(batch, masks)))
                return
            self._finish_all()
            answer = self._start(*values) if kind == "start" else self._worker.call(*values)
        except BaseException as error:  # noqa: BLE001 - the engine raises it
            self.link.send(number, error_of(error))
        else:
            self.link.send(number, answer_of("answer", answer))

    @property
    def _worker(self) -> WorkerLike:
        assert self.worker is not None, "the worker was not started"
        return self.worker

    def _start(self, make_worker: Callable[..., WorkerLike], place: Any, sampling: range) -> Any:
        self.samples = place.rank in sampling
        self.answers = place.rank == sampling.start
        self.worker = make_worker(place)
        return self.worker.load()

    def _masks_of(self, step: int) -> TokenMasks:
        """Return the masks of a step. The engine makes them from the results of all earlier steps,
        so these are sent first. Other messages that come meanwhile are kept in order."""
        self._finish_all()
        while step not in self.masks:
            number, message = self.link.receive()
            if number:
                self.kept.append((number, message))
            else:
                masked, masks = pickle.loads(message)
                self.masks[masked] = masks
        return self.masks.pop(step)

    def _finish_all(self) -> None:
        while self.started:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the result of the oldest step, and answer."""
        number, wait = self.started.popleft()
        began = time.perf_counter()
        try:
            output = wait()
        except BaseException as error:  # noqa: BLE001 - the engine raises it
            self.link.send(number, error_of(error))
            return
        self.last_wait_s = time.perf_counter() - began
        if (result := result_of(output, self.answers)) is not None:
            self.link.send(number, answer_of(*result))
