"""The results of steps, which the last stage samples, for the engines of the ranks before it.

The first rank of the last stage sends each result over a socket to every rank of the other stages.
The sockets meet in a folder that only this user can open.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pegboard.data.batch import StepOutput
from pegboard.errors import EngineDeadError, is_failure
from pegboard_executor_local.link import Link, LinkClosed, framed, send_all
from pegboard_executors.answers import answer_of, error_of

SAME_CALLS = "the programs of all ranks must make the same calls in the same order"


class Results(Protocol):
    """What a rank does with the result of a step."""

    def of(self, step: int, compute: Callable[[], StepOutput]) -> StepOutput:
        """Compute a step, and return its result, which is the same on all ranks. Steps come in
        order. Raises what the rank raises that samples, and EngineDeadError if it has ended."""

    def close(self) -> None: ...


class OwnResults:
    """Of a rank that tells nobody: there is one stage, or another rank of the last one does."""

    def of(self, step: int, compute: Callable[[], StepOutput]) -> StepOutput:
        return compute()

    def close(self) -> None: ...


class SentResults:
    """Of the first rank of the last stage. links: to the ranks of the stages before it."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links

    def of(self, step: int, compute: Callable[[], StepOutput]) -> StepOutput:
        try:
            output = compute()
        except BaseException as error:
            if is_failure(error):
                self._send(step, error_of(error))
            raise
        self._send(step, answer_of("answer", output))
        return output

    def _send(self, step: int, answer: bytes) -> None:
        try:
            send_all(self._links, framed(step, answer), _refuse)
        except LinkClosed as error:
            raise EngineDeadError(
                "a rank of an earlier pipeline stage has ended, or it has stopped its engine"
            ) from error

    def close(self) -> None:
        for link in self._links:
            link.close()


class ReceivedResults:
    """Of a rank of an earlier stage. link: to `sampling`, the rank that samples."""

    def __init__(self, link: Link, sampling: int) -> None:
        self._link = link
        self._sampling = sampling

    def of(self, step: int, compute: Callable[[], StepOutput]) -> StepOutput:
        compute()
        try:
            number, answer = self._link.receive()
        except LinkClosed as error:
            raise EngineDeadError(
                f"rank {self._sampling}, which samples, has ended, or it has stopped its engine"
            ) from error
        kind, value = pickle.loads(answer)
        if kind == "error":
            raise value
        if number != step:
            raise EngineDeadError(
                f"rank {self._sampling} has computed step {number}, and this one step {step}: "
                + SAME_CALLS
            )
        output: StepOutput = value
        return output

    def close(self) -> None:
        self._link.close()


@contextmanager
def meeting_point(folder: Path) -> Iterator[str]:
    """Yield the address in a folder at which ranks meet. It is short, because sockets take no path
    of more than 107 bytes."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{number}/results"
    finally:
        os.close(number)


def listen(folder: Path) -> socket.socket:
    """Return the socket at which other ranks arrive."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with meeting_point(folder) as address:
        listener.bind(address)
    listener.listen()
    return listener


def accept(listener: socket.socket, count: int) -> SentResults:
    """Wait for `count` ranks, and close the listening socket. Raises EngineDeadError if one does
    not come within the listener's time limit."""
    links: list[Link] = []
    with listener:
        while len(links) < count:
            try:
                end, _ = listener.accept()
            except TimeoutError as error:
                for link in links:
                    link.close()
                raise EngineDeadError(
                    f"{count - len(links)} of {count} ranks of earlier pipeline stages did not come"
                ) from error
            end.setblocking(True)
            links.append(Link(end))
    return SentResults(links)


def arrive(folder: Path, sampling: int) -> ReceivedResults:
    """Connect to the rank that samples, which listens."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with meeting_point(folder) as address:
            end.connect(address)
    except OSError as error:
        end.close()
        raise EngineDeadError(f"rank {sampling}, which samples, has ended: {error}") from error
    return ReceivedResults(Link(end), sampling)


def _refuse(link: Link) -> None:
    """A rank of an earlier stage sends nothing, so its link is closed."""
    raise LinkClosed
