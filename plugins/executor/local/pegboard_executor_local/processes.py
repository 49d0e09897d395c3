"""One process for each rank, on this host.

The engine's process sends each message to all ranks over their sockets, and reads one answer from
each. A thread notices when a process ends or is stopped. It kills the others, which would wait for
it, so the engine's process reads the end of their sockets.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import signal
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from pegboard.data.batch import Batch, StepOutput, TokenMasks
from pegboard.data.transfers import TransferMerger
from pegboard.errors import EngineDeadError, PegboardError
from pegboard.interfaces.executor import (
    ChildProcess,
    ExecutorSetup,
    Place,
    WorkerDeath,
    WorkerReady,
)

LOOK_S = 0.5
"""Seconds between two looks at whether a process is stopped (SIGSTOP)."""
PATIENCE_S = (5.0, 2.0, 2.0)
"""Seconds that a process may take to end: by itself, after SIGUSR1, after SIGKILL."""
DEATH_S = 10.0
"""Seconds after which a socket that has ended is an error even if its process has not."""
SIGNALS = {signal.SIGINT, signal.SIGTERM}


class Step:
    """A submitted step."""

    def __init__(self, executor: ProcessesExecutor) -> None:
        self.executor = executor
        self.output: StepOutput | None = None
        self.error: Exception | None = None

    def result(self) -> StepOutput:
        while self.output is None and self.error is None:
            self.executor.receive()
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output


class ProcessesExecutor:
    """pending: the steps whose answers have not been read, in order."""

    def __init__(self, options: None, setup: ExecutorSetup) -> None:
        self.setup = setup
        self.children: list[ChildProcess] = []
        self.connections: list[Connection] = []
        self.pending: deque[Step] = deque()
        self.transfers = TransferMerger(setup.ranks)
        self.on_death: Callable[[WorkerDeath], None] = lambda death: None
        self.death: WorkerDeath | None = None
        self.is_dead = threading.Event()
        self.is_stopping = threading.Event()
        self.watcher = threading.Thread(target=self._watch, name="pegboard-ranks", daemon=True)

    def start(self) -> list[WorkerReady]:
        """Start a process for each rank. All load their weights at the same time."""
        folder = tempfile.mkdtemp(prefix="pegboard-ranks-")
        try:
            for rank in range(self.setup.ranks):
                self._start(rank, folder)
            self.watcher.start()
            return [ready for ready in self._answers() if isinstance(ready, WorkerReady)]
        except BaseException:
            self.stop()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, rank: int, folder: str) -> None:
        start_process = self.setup.start_process
        assert start_process is not None, "this executor needs ExecutorSetup.start_process"
        ranks = self.setup.ranks
        here, other = socket.socketpair()
        with other, signals_wait():
            child = start_process(
                "pegboard_executor_local.rank:main",
                role=f"worker {rank}",
                folder=folder,
                pass_fds=(other.fileno(),),
                fd=other.fileno(),
            )
        self.children.append(child)
        self.connections.append(Connection(here.detach()))
        place = Place(rank, ranks, rank, ranks, f"{Path(folder).as_uri()}/meet")
        self.connections[rank].send_bytes(pickle.dumps((self.setup.make_worker, place)))

    def submit(self, batch: Batch) -> Step:
        self._send("step", batch)
        step = Step(self)
        self.pending.append(step)
        return step

    def provide_masks(self, step: int, masks: TokenMasks) -> None:
        self._send("masks", step, masks)

    def call(self, method: str, *args: object) -> list[object]:
        while self.pending:
            self.receive()
        self._send("call", method, args)
        return self._answers()

    def receive(self) -> None:
        """Read the answers to the oldest step."""
        step = self.pending.popleft()
        try:
            outputs = self._answers()
        except Exception as error:  # noqa: BLE001 - raised by `Step.result`
            step.error = error
            return
        output = outputs[0]
        assert isinstance(output, StepOutput)
        if output.transfers:
            output.transfers = self.transfers.merge([each.transfers for each in outputs])  # type: ignore[attr-defined]
        step.output = output

    def _send(self, *message: object) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank, connection in enumerate(self.connections):
            try:
                connection.send_bytes(data)
            except OSError:
                raise self._died(rank) from None

    def _answers(self) -> list[object]:
        """Return the next answer of each rank, in order. Raises the error of the first rank that
        has one, rather than of one that only waited for it."""
        answers: list[Any] = []
        for rank, connection in enumerate(self.connections):
            try:
                answers.append(pickle.loads(connection.recv_bytes()))
            except (EOFError, OSError):
                raise self._died(rank) from None
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        for error in sorted(errors, key=lambda error: isinstance(error, EngineDeadError)):
            raise error
        return answers

    def _died(self, rank: int) -> PegboardError:
        """Return the error for a socket that has ended."""
        self.is_dead.wait(DEATH_S)
        if self.death is None:
            return EngineDeadError(f"worker {rank} has closed its socket")
        return EngineDeadError(f"worker {self.death.rank} died: {self.death.reason}")

    def watch(self, on_death: Callable[[WorkerDeath], None]) -> None:
        self.on_death = on_death

    def _watch(self) -> None:
        """Wait until a process ends, or is stopped in two looks."""
        ranks = {child.sentinel: rank for rank, child in enumerate(self.children)}
        stopped: set[int] = set()
        while not self.is_stopping.is_set():
            ended = wait(list(ranks), LOOK_S)
            if self.is_stopping.is_set():
                return
            if ended:
                rank = min(ranks[sentinel] for sentinel in ended if isinstance(sentinel, int))
                child = self.children[rank]
                while child.exitcode is None and not self.is_stopping.wait(0.01):
                    pass
                return self._dead(rank, child.how_it_ended())
            seen = {rank for rank, child in enumerate(self.children) if is_stopped(child.pid)}
            if both := seen & stopped:
                return self._dead(min(both), "it is stopped (SIGSTOP)")
            stopped = seen

    def _dead(self, rank: int, reason: str) -> None:
        """Note the death, and kill the other ranks."""
        self.death = WorkerDeath(rank, reason)
        self.is_dead.set()
        for child in self.children:
            if child.exitcode is None:
                child.kill()
        self.on_death(self.death)

    def stop(self) -> None:
        self.is_stopping.set()
        for connection in self.connections:
            connection.close()
        for child in self.children:
            child.end(PATIENCE_S)
        if self.watcher.ident is not None and self.watcher is not threading.current_thread():
            self.watcher.join()
        self.connections = []
        self.children = []
        self.pending.clear()


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == ["T"]


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Block SIGINT and SIGTERM in the block. A process that starts in it has them blocked, too."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
