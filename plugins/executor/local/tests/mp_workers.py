"""Workers of `test_mp.py`, in a module that their processes can import."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np
from pegboard_executor_local.headless import run_host

from pegboard.data.batch import CSR, Batch, StepOutput, TokenMasks, TransferReport
from pegboard.engine.boundary.spawn import Child, take_signals
from pegboard.errors import EngineDeadError, PegboardError, PluginBroken
from pegboard.interfaces.executor import Hosts, HostSetup, WorkerReady
from pegboard_testing.recording_worker import RecordingWorker


class OddError(Exception):
    """An error that cannot be pickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Outspoken(RecordingWorker):
    """Its calls raise errors and return values of all kinds, and end the process."""

    def call(self, method: str, *args: object) -> object:
        if method == "plugin":
            raise PluginBroken("it is broken", plugin="sampler:x")
        if method == "value":
            raise LookupError("no such value")
        if method == "odd":
            raise OddError("an odd", "error")
        if method == "function":
            return lambda: None
        if method == "leave" and self.rank == self.place.ranks - 1:
            os._exit(3)
        return super().call(method, *args)


class Asynchronous(RecordingWorker):
    """Its device computes while it starts other steps. The result of a step says what it has
    started and awaited so far: n and -n for step n."""

    def __init__(self, place: object) -> None:
        super().__init__(place)  # type: ignore[arg-type]
        self.events: list[int] = []

    def run(self, batch: Batch, masks: Callable[[], TokenMasks] | None) -> Callable[[], StepOutput]:
        self.events.append(batch.step)
        output = super().run(batch, masks)()

        def wait() -> StepOutput:
            time.sleep(0.01)
            self.events.append(-batch.step)
            output.token_ids = CSR.of([list(self.events)])
            return output

        return wait


class Large(RecordingWorker):
    """It returns what it gets."""

    def run(self, batch: Batch, masks: Callable[[], TokenMasks] | None) -> Callable[[], StepOutput]:
        output = StepOutput(step=batch.step, rows=batch.rows, token_ids=CSR.empty())
        return lambda: output


class Transferring(RecordingWorker):
    """Rank r saves request "a" in step 1 + 2r."""

    def run(self, batch: Batch, masks: Callable[[], TokenMasks] | None) -> Callable[[], StepOutput]:
        ids = ["a"] if batch.step == 1 + 2 * self.rank else []
        output = StepOutput(
            step=batch.step,
            rows=np.zeros(0, np.int32),
            token_ids=CSR.empty(),
            transfers={"c": TransferReport(saved=ids)},
        )
        return lambda: output


class Collective(RecordingWorker):
    """The last rank dies in a step, and the others notice that before the engine does."""

    def run(self, batch: Batch, masks: Callable[[], TokenMasks] | None) -> Callable[[], StepOutput]:
        if self.rank == self.place.ranks - 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        raise EngineDeadError("all_reduce: rank 1 did not come")


class Slow(RecordingWorker):
    """Its weights take minutes to load."""

    def load(self) -> WorkerReady:
        time.sleep(600)
        return super().load()


def no_plugins_in_common() -> None:
    raise PluginBroken("other plugins: acme (here 1, there 2)")


def run_second_host(port: int, hosts: int, ranks: int, number: int = 1) -> None:
    """The process of a host without an engine."""
    take_signals(signal.SIG_DFL)
    setup = HostSetup(Hosts(hosts, number, "127.0.0.1", port), ranks, Child)
    try:
        code = run_host(setup)
    except PegboardError as error:
        print(error, file=sys.stderr)
        code = 2
    sys.exit(code)
