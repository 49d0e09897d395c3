"""One process for each rank, on this machine.

Every rank has a link to the engine's process (`link.py`). A batch is pickled once, and every rank
gets the same bytes. The first rank that samples answers each step. The others answer it only if it
failed, or if a transfer has ended in it.
"""

from __future__ import annotations

import pickle
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from pegboard.data.batch import Batch, StepOutput, TokenMasks
from pegboard.data.transfers import TransferMerger
from pegboard.errors import ConfigError, EngineDeadError
from pegboard.interfaces.executor import (
    ChildProcess,
    ExecutorSetup,
    Place,
    WorkerDeath,
    WorkerReady,
)
from pegboard_executor_local.link import Link, LinkClosed, framed, send_all
from pegboard_executor_local.remote import RemoteHosts
from pegboard_executor_local.watch import Watch
from pegboard_executors.answers import dumped
from pegboard_executors.questions import Question, Step

DEATH_S = 5.0
"""Seconds in which the death of a rank that has closed its link is noticed."""

PATIENCE_S = (1.0, 0.3, 5.0)
"""Seconds to wait for the ranks to end: after their links are closed, after SIGUSR1, and after
SIGKILL."""

MASKS = 0
"""The number of the messages that hand over masks. They are not answered."""


class ProcessExecutor:
    def __init__(self, options: None, setup: ExecutorSetup) -> None:
        self._setup = setup
        self._children: list[ChildProcess] = []
        self._links: list[Link] = []
        self._ranks: dict[int, int] = {}
        self._arrivals = select.poll()
        self._watch: Watch | None = None
        self._folder: str | None = None
        self._hosts: RemoteHosts | None = None
        self._on_death: Callable[[WorkerDeath], None] | None = None
        self._num_questions = 0
        self._questions: dict[int, Question] = {}
        self._late_error: BaseException | None = None
        self._transfers = TransferMerger(setup.ranks)

    # --- start and stop ---------------------------------------------------------------------------

    def start(self) -> list[WorkerReady]:
        setup = self._setup
        ranks = setup.ranks
        local = ranks if setup.hosts is None else ranks // setup.hosts.count
        try:
            if setup.hosts is not None:
                self._hosts = RemoteHosts(setup.hosts, local, setup)
            address = self._address()
            # pickled before any process starts, because it may fail
            starts = [
                dumped(
                    (
                        "start",
                        setup.make_worker,
                        Place(rank, ranks, rank % local, local, address),
                        setup.sampling,
                    )
                )
                for rank in range(ranks)
            ]
            for rank in range(local):
                self._start_process(rank)
            if self._hosts is not None:
                for remote in self._hosts.wait_for_all():
                    self._add(remote.link)
                    self._children.append(remote)
            self._watch = Watch(self._children, self._wake)
            if self._on_death is not None:
                self._watch.tell(self._on_death)
            # each gets its own at once, so all of them load at the same time
            number = self._new_question(ranks, is_hasty=True)
            for link, start in zip(self._links, starts, strict=True):
                self._send([link], number, start)
            ready = self._settled(number).result()
        except BaseException:
            if self._hosts is not None:
                self._hosts.abandon()
            self.stop()
            raise
        self._remove_folder()
        return [ready[rank] for rank in range(ranks)]

    def _start_process(self, rank: int) -> None:
        start_process = self._setup.start_process
        if start_process is None:
            raise ConfigError(
                "the executor mp starts a process for each rank, but this engine starts none; "
                "choose --distributed-executor-backend uni"
            )
        engine_end, rank_end = socket.socketpair()
        self._add(Link(engine_end))
        with rank_end:
            number = rank_end.fileno()
            child = start_process(
                "pegboard_executor_local.rank:main",
                role=f"worker {rank}",
                folder=self._folder,
                pass_fds=(number,),
                fd=number,
            )
        self._children.append(child)

    def _add(self, link: Link) -> None:
        """Add the link of the next rank."""
        self._ranks[link.fileno()] = len(self._links)
        self._links.append(link)
        self._arrivals.register(link, select.POLLIN)

    def _address(self) -> str:
        """Return where the ranks meet: a file, or on several hosts the port after the engine's."""
        hosts = self._setup.hosts
        if hosts is not None:
            return f"tcp://{hosts.address}:{hosts.port + 1}"
        self._folder = tempfile.mkdtemp(prefix="pegboard-ranks-")
        return (Path(self._folder) / "meet").as_uri() if self._setup.ranks > 1 else ""

    def watch(self, on_death: Callable[[WorkerDeath], None]) -> None:
        self._on_death = on_death
        if self._watch is not None:
            self._watch.tell(on_death)

    def _wake(self) -> None:
        """Wake the engine's thread if it waits for an answer: none comes any more."""
        for link in self._links:
            link.shut_down()

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        if self._hosts is not None:
            self._hosts.stop()
        for link in self._links:
            link.close()
        end_all(self._children)
        if self._hosts is not None:
            self._hosts.close()
            self._hosts = None
        self._children.clear()
        self._links.clear()
        self._questions.clear()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # --- steps and calls --------------------------------------------------------------------------

    def submit(self, batch: Batch) -> Step:
        number = self._new_question(1, is_hasty=True)
        self._send(self._links, number, dumped(("step", batch)))
        return Step(partial(self.output_of, number))

    def output_of(self, number: int) -> StepOutput:
        """Wait for the result of a step. It has the reports of all ranks on transfers."""
        output: StepOutput = self._settled(number).result()[self._setup.sampling.start]
        output.transfers = self._transfers.take()
        return output

    def provide_masks(self, step: int, masks: TokenMasks) -> None:
        links = [self._links[rank] for rank in self._setup.sampling]
        self._send(links, MASKS, dumped((step, masks)))

    def call(self, method: str, *args: object) -> list[object]:
        number = self._new_question(self._setup.ranks, is_hasty=False)
        self._send(self._links, number, dumped(("call", method, *args)))
        answers = self._settled(number).result()
        return [answers[rank] for rank in range(self._setup.ranks)]

    def _new_question(self, needs: int, *, is_hasty: bool) -> int:
        self._num_questions += 1
        self._questions[self._num_questions] = Question(needs, self._setup.ranks, is_hasty=is_hasty)
        return self._num_questions

    def _send(self, links: Sequence[Link], number: int, payload: bytes) -> None:
        self._raise_late_error()
        try:
            send_all(links, framed(number, payload), self._take)
        except LinkClosed:
            self._raise_death()

    def _settled(self, number: int) -> Question:
        """Wait for the answers to a question, and forget it."""
        question = self._questions.get(number)
        if question is None:
            raise EngineDeadError("the workers were stopped before they answered")
        try:
            while not question.is_settled():
                self._raise_late_error()
                for end, _ in self._arrivals.poll(patience_ms(question)):
                    self._take(self._links[self._ranks[end]])
        except LinkClosed:
            self._raise_death()
        finally:
            self._questions.pop(number, None)
        return question

    def _take(self, link: Link) -> None:
        """Receive a message of a rank."""
        number, message = link.receive()
        kind, value = pickle.loads(message)
        rank = self._ranks[link.fileno()]
        question = self._questions.get(number)
        if kind == "transfers":
            self._transfers.add(rank, value)
        elif question is not None:
            question.take(rank, kind == "error", value)
            if isinstance(value, StepOutput):
                self._transfers.add(rank, value.transfers)
        elif kind == "error":
            self._late_error = self._late_error or value

    def _raise_late_error(self) -> None:
        """Raise the error of a rank in a step that has already been answered."""
        error = self._late_error
        self._late_error = None
        if error is not None:
            raise error

    def _raise_death(self) -> NoReturn:
        """A link is closed, so a rank has died."""
        death = self._watch.reason(DEATH_S) if self._watch is not None else None
        if death is None:
            raise EngineDeadError("a worker has closed its link to the engine; its log says why")
        raise EngineDeadError(f"worker {death.rank} died: {death.reason}")


def patience_ms(question: Question) -> float | None:
    """Return how many milliseconds to wait for the next answer; None = without a limit."""
    patience_s = question.patience_s()
    return None if patience_s is None else patience_s * 1000


def end_all(children: Sequence[ChildProcess]) -> None:
    """Let processes end that should end by themselves, and make those end that do not. They all end
    at the same time."""
    wait_for_ends(children, PATIENCE_S[0])
    for child in children:
        if child.exitcode is None:
            child.end_now()
    wait_for_ends(children, PATIENCE_S[1])
    for child in children:
        if child.exitcode is None:
            child.kill()
    for child in children:
        child.end((PATIENCE_S[2], 0.0, 0.0))


def wait_for_ends(children: Sequence[ChildProcess], timeout_s: float) -> None:
    """Wait until all processes have ended, but at most `timeout_s` seconds."""
    limit = time.monotonic() + timeout_s
    while rest := [child.sentinel for child in children if child.exitcode is None]:
        left_s = limit - time.monotonic()
        if left_s <= 0:
            return
        wait(rest, left_s)
        time.sleep(0.002)  # a process has an exit code a little later than it closes its link
