"""The process of one rank: it receives messages from the engine's process and answers in order.

    engine → rank   (make_worker, Place), then ("step", Batch), ("masks", step, TokenMasks),
                    ("call", method, arguments)
    rank → engine   WorkerReady, then a StepOutput or a result for each step and call, or an
                    exception

Messages are pickled, which is safe because only the two processes have the socket. When the engine
closes it, the process ends.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from pegboard.data.batch import CSR, Batch, StepOutput, TokenMasks
from pegboard.errors import PegboardError
from pegboard.interfaces.executor import WorkerLike
from pegboard.log import get_logger

log = get_logger(__name__)

Message = tuple[Any, ...]


class Closed(BaseException):
    """The engine has closed the socket. Not an Exception, so that no plugin catches it."""


class Rank:
    """started: steps whose results are still to be waited for. later: messages that came while
    masks were awaited. is_first: the rank whose results the engine uses."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.later: deque[Message] = deque()
        self.started: deque[Callable[[], StepOutput]] = deque()
        self.masks: dict[int, TokenMasks] = {}
        self.is_first = True
        self.worker: WorkerLike

    def serve(self) -> None:
        """Make the worker, and answer until the engine closes the socket."""
        try:
            make_worker, place = self._receive()
            self.is_first = place.rank == 0
            self._answer(lambda: self._load(make_worker, place))
            while True:
                self._handle(self.later.popleft() if self.later else self._next())
        except Closed:
            if worker := vars(self).get("worker"):
                worker.stop()

    def _load(self, make_worker: Callable[..., WorkerLike], place: Any) -> object:
        self.worker = make_worker(place)
        return self.worker.load()

    def _next(self) -> Message:
        """Return the next message. If none is there, wait for the results of the steps first."""
        while self.started and not self.connection.poll():
            self._answer(self.started.popleft())
        return self._receive()

    def _receive(self) -> Message:
        try:
            message: Message = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise Closed from None
        return message

    def _handle(self, message: Message) -> None:
        kind, *rest = message
        if kind == "step":
            self._start(*rest)
        elif kind == "masks":
            self.masks[rest[0]] = rest[1]
        else:
            while self.started:
                self._answer(self.started.popleft())
            method, arguments = rest
            self._answer(lambda: self.worker.call(method, *arguments))

    def _start(self, batch: Batch) -> None:
        """Start a step. The results of earlier ones are waited for afterwards, because a device may
        compute both in turn."""
        masks = (lambda: self._masks_of(batch.step)) if batch.needs_masks else None
        try:
            wait = self.worker.run(batch, masks)
        except Exception as error:  # noqa: BLE001 - the engine raises it
            failure = portable(error)
            wait = lambda: fail(failure)  # noqa: E731
        self.started.append(wait)

    def _masks_of(self, step: int) -> TokenMasks:
        while step not in self.masks:
            message = self._receive()
            if message[0] == "masks":
                self._handle(message)
            else:
                self.later.append(message)
        return self.masks.pop(step)

    def _answer(self, make: Callable[[], object]) -> None:
        try:
            answer = make()
        except Exception as error:  # noqa: BLE001 - the engine raises it
            answer = portable(error)
        if isinstance(answer, StepOutput) and not self.is_first:
            # the results of all ranks are equal; only transfers are their own
            answer = StepOutput(
                step=answer.step,
                rows=answer.rows[:0],
                token_ids=CSR.empty(),
                transfers=answer.transfers,
            )
        try:
            self.connection.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
        except OSError:
            raise Closed from None


def main(fd: int) -> None:
    """The body of a rank's process. fd: of its socket."""
    Rank(Connection(fd)).serve()


def fail(error: Exception) -> StepOutput:
    raise error


def portable(error: Exception) -> Exception:
    """Return the error, or a PegboardError that says the same if it cannot be pickled. Its
    traceback is logged here, because it stays in this process."""
    if not isinstance(error, PegboardError):
        log.error("the worker failed", exc_info=error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs the code of the error's class
        return PegboardError(f"{type(error).__name__}: {error}")
    return error
