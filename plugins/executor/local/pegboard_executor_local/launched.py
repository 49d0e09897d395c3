"""One rank in a process that a launcher has started, such as torchrun. Every rank's process runs
the same program and has an engine of its own; the engines decide alike. They exchange what workers
answer, so that each knows the memory of all. If the ranks are pipeline stages, all engines get the
results of the last one.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import pickle
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from pegboard.data.batch import Batch, StepOutput
from pegboard.env import launcher_variables
from pegboard.errors import ConfigError, EngineDeadError, portable
from pegboard.interfaces.executor import ExecutorSetup, Place, WorkerReady
from pegboard_executor_local.in_process import InProcessExecutor, Step
from pegboard_executor_local.last_stage import (
    SAME_CALLS,
    OwnResults,
    Results,
    accept,
    arrive,
    listen,
)
from pegboard_executors.answers import dumped

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the answers of the others, which may load more slowly."""

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
ADVICE = "start the program with torchrun"

executors = itertools.count()
"""Numbers the executors of a process. Processes that run the same program count alike."""


class SharedStep(Step):
    """A step whose result all ranks have."""

    def __init__(self, executor: InProcessExecutor, batch: Batch, results: Results) -> None:
        super().__init__(executor, batch)
        self.results = results

    def result(self) -> StepOutput:
        return self.results.of(self.batch.step, super().result)


class LaunchedExecutor(InProcessExecutor):
    def __init__(self, options: None, setup: ExecutorSetup) -> None:
        variables = launcher_variables()
        place = place_of(variables, setup)
        self._meeting: Meeting | None = None
        self._results: Results = OwnResults()
        if place.ranks > 1:
            self._meeting = Meeting(variables, place)
            place = self._meeting.place
        try:
            if self._meeting is not None:
                self._results = self._meeting.results(setup.sampling)
            super().__init__(None, setup, place)
        except BaseException:
            self._part()
            self._results.close()
            raise

    def start(self) -> list[WorkerReady]:
        try:
            return self._answers("load", self.worker.load)
        finally:
            self._part()

    def new_step(self, batch: Batch) -> Step:
        return SharedStep(self, batch, self._results)

    def stop(self) -> None:
        self._results.close()
        super().stop()

    def call(self, method: str, *args: object) -> list[object]:
        call = partial(super().call, method, *args)
        return self._answers(method, lambda: call()[0])

    def _answers(self, name: str, answer: Callable[[], Any]) -> list[Any]:
        """Return the answers of all ranks, in rank order."""
        return [answer()] if self._meeting is None else self._meeting.answers(name, answer)

    def _part(self) -> None:
        if self._meeting is not None:
            self._meeting.remove_folder()


class Meeting:
    """Where the ranks of one host meet: the launcher's store, and a folder that only they can open.
    place: of this rank, with an address in the folder.

    Anyone who reaches the store's port can write to it, so answers are signed with a key that
    the first rank leaves in the folder."""

    def __init__(self, variables: Mapping[str, str], place: Place) -> None:
        store = TCPStore(
            variables["MASTER_ADDR"],
            int(variables["MASTER_PORT"]),
            is_master=place.rank == 0 and not variables.get("TORCHELASTIC_USE_AGENT_STORE"),
            timeout=PATIENCE,
            wait_for_workers=False,
            multi_tenant=True,  # the program may use the store too
        )
        attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = PrefixStore(f"pegboard/{attempt}/{next(executors)}", store)
        self._rank = place.rank
        self._ranks = place.ranks
        self._number = 0
        self._folder = self._make_folder() if place.rank == 0 else self._find_folder()
        self._key = (self._folder / "key").read_bytes()
        address = (self._folder / "meet").as_uri()
        self.place = Place(place.rank, place.ranks, place.local_rank, place.local_ranks, address)

    def answers(self, name: str, answer: Callable[[], Any]) -> list[Any]:
        """Return the answers of all ranks. name: of the question, the same on all ranks. Raises
        the error of a rank, and ConfigError if ranks ask differently."""
        try:
            mine = (name, "answer", answer())
        except Exception as error:
            self._post((name, "error", portable(error)))
            raise
        self._post(mine)
        answers = [self._read(rank) for rank in range(self._ranks)]
        for rank, (asked, kind, value) in enumerate(answers):
            if kind == "error":
                raise value
            if asked != name:
                raise ConfigError(
                    f"rank {rank} was asked {asked!r} and rank {self._rank} {name!r}: {SAME_CALLS}"
                )
        return [value for _, _, value in answers]

    def results(self, sampling: range) -> Results:
        """Return what this rank does with results, if these ranks sample. Waits until the ranks of
        all stages are connected."""
        first = sampling.start
        if first == 0 or self._rank > first:
            return OwnResults()
        if self._rank < first:
            self._wait_for("listens", first)
            return arrive(self._folder, first)
        listener = listen(self._folder)
        listener.settimeout(PATIENCE.total_seconds())
        self._store.set("listens", b"")
        return accept(listener, first)

    def remove_folder(self) -> None:
        """Remove the folder, if this is the first rank, which has made it."""
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _make_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="pegboard-ranks-"))
        (folder / "key").write_bytes(os.urandom(32))
        self._store.set("folder", str(folder))
        return folder

    def _find_folder(self) -> Path:
        """Return the folder of the first rank. Raises ConfigError if another user may have made
        it."""
        folder = Path(self._wait_for("folder", 0).decode())
        try:
            status = folder.lstat()
        except OSError as error:
            raise ConfigError(
                f"rank {self._rank} cannot open {folder}, where rank 0 waits: {error.strerror}; "
                "external_launcher needs all ranks on one host, with the same TMPDIR"
            ) from error
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not is_ours or status.st_mode & 0o077:
            raise ConfigError(
                f"{folder} is not a folder that only this user can open; ranks do not meet there"
            )
        return folder

    def _post(self, answer: tuple[str, str, object]) -> None:
        self._number += 1
        name = self._name(self._rank)
        payload = dumped(answer)
        self._store.set(name, self._signature(name, payload) + payload)
        # whoever has posted an answer has read those of the question before
        if self._number > 2:
            self._store.delete_key(self._name(self._rank, self._number - 2))

    def _read(self, rank: int) -> tuple[str, str, Any]:
        name = self._name(rank)
        message = self._wait_for(name, rank)
        signature = message[:32]
        payload = message[32:]
        if not hmac.compare_digest(signature, self._signature(name, payload)):
            raise EngineDeadError(f"the answer of rank {rank} is not signed with the ranks' key")
        answer: tuple[str, str, Any] = pickle.loads(payload)
        return answer

    def _wait_for(self, name: str, rank: int) -> bytes:
        try:
            return bytes(self._store.get(name))
        except RuntimeError as error:
            raise EngineDeadError(f"rank {rank} did not answer: {error}") from error

    def _name(self, rank: int, number: int | None = None) -> str:
        return f"answer/{self._number if number is None else number}/{rank}"

    def _signature(self, name: str, payload: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + payload, hashlib.sha256)


def place_of(variables: Mapping[str, str], setup: ExecutorSetup) -> Place:
    """Return the place that the launcher gives this process. Raises ConfigError if it gives none,
    or not as many as there are ranks."""
    missing = [name for name in ("MASTER_ADDR", *NUMBERS) if name not in variables]
    if missing:
        raise ConfigError(
            f"external_launcher needs {', '.join(missing)} in the environment; {ADVICE}"
        )
    for name in NUMBERS:
        if not variables[name].isdecimal():
            raise ConfigError(f"{name}={variables[name]!r}: expected a number; {ADVICE}")
    rank, ranks, local_rank, local_ranks, _ = (int(variables[name]) for name in NUMBERS)
    if ranks != setup.ranks:
        raise ConfigError(
            f"WORLD_SIZE is {ranks}, but tensor_parallel_size times pipeline_parallel_size asks "
            f"for {setup.ranks} ranks; let torchrun start {setup.ranks} processes, or set other "
            "sizes"
        )
    if not rank == local_rank < ranks == local_ranks:
        raise ConfigError(
            f"RANK is {rank} of {ranks}, LOCAL_RANK {local_rank} of {local_ranks}: "
            "external_launcher needs all ranks on one host; on several hosts, start them with "
            "pegboard serve --nnodes"
        )
    return Place(rank, ranks, local_rank, local_ranks)
