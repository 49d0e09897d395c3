"""Workers whose processes can be of any node."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from pegboard.data.batch import CSR, Batch, StepOutput, TokenMasks, TransferReport
from pegboard.errors import PluginBroken
from pegboard.interfaces.executor import WorkerReady
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
        if method == "odd":
            raise OddError("an odd", "error")
        if method == "function":
            return lambda: None
        if method == "threads":
            return os.environ.get("OMP_NUM_THREADS")
        if method == "leave" and self.rank == self.place.ranks - 1:
            os._exit(3)
        return super().call(method, *args)


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


class Slow(RecordingWorker):
    """Its weights take minutes to load."""

    def load(self) -> WorkerReady:
        time.sleep(600)
        return super().load()
