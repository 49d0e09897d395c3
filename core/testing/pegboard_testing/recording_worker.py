"""The worker in the contract tests of executors. It may run in any process, so importing it is
fast."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from pegboard.data.batch import CSR, Batch, BlockDelta, StepOutput, TokenMasks
from pegboard.errors import ConfigError, EngineDeadError, ModelError
from pegboard.interfaces.executor import Place, WorkerReady
from pegboard_testing.fake_model import fake_kv_spec

FAILS = 13
"""The number of the step in which every worker raises."""

FAILS_ON_LAST = 17
"""The number of the step in which the worker of the last rank raises."""

LASTS = 19
"""The number of the step that takes minutes."""


def make_batch(step: int, *, needs_masks: bool = False) -> Batch:
    """Return a batch that is empty except for `step`."""
    none = np.zeros(0, np.int32)
    return Batch(
        step=step,
        rows=none,
        num_scheduled_tokens=none,
        num_computed_tokens=none,
        num_draft_tokens=none,
        samples=np.zeros(0, bool),
        new=[],
        removed_rows=none,
        new_blocks=BlockDelta.empty(),
        copy_blocks=np.zeros((0, 3), np.int32),
        needs_masks=needs_masks,
    )


def make_masks(value: int) -> TokenMasks:
    return TokenMasks(np.zeros(1, np.int32), np.zeros(1, np.int32), np.array([[value]], np.uint32))


class RecordingWorker:
    """A worker whose result of a step is the steps until then, the mask that it got, and its rank
    as a draft. It returns its place and its process when it is asked for them."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rank = place.rank
        self.steps: list[int] = []
        self.num_stops = 0

    def load(self) -> WorkerReady:
        return WorkerReady(self.rank, {0: fake_kv_spec()}, 1000 + self.rank)

    def run(self, batch: Batch, masks: Callable[[], TokenMasks] | None) -> Callable[[], StepOutput]:
        self.steps.append(batch.step)
        if batch.step == FAILS:
            raise ModelError("step 13 fails")
        if batch.step == FAILS_ON_LAST and self.rank == self.place.ranks - 1:
            raise ModelError(f"step 17 fails on rank {self.rank}")
        if batch.step == LASTS:
            time.sleep(600)
        mask = int(masks().bits[0, 0]) if masks is not None else -1
        output = StepOutput(
            step=batch.step,
            rows=np.array([mask], np.int32),
            token_ids=CSR.of([list(self.steps)]),
            draft_token_ids=CSR.of([[self.rank]]),
        )
        return lambda: output

    def call(self, method: str, *args: object) -> object:
        if method == "fail":
            raise ConfigError(f"rank {self.rank} cannot do that")
        if method == "fail_on_last":
            if self.rank == self.place.ranks - 1:
                raise ConfigError(f"rank {self.rank} cannot do that")
            return None
        if method == "place":
            return self.place
        if method == "pid":
            return os.getpid()
        return (method, self.rank, *args)

    def stop(self) -> None:
        self.num_stops += 1


class DamagedWorker(RecordingWorker):
    """A worker that cannot load its weights."""

    def load(self) -> WorkerReady:
        raise ModelError("weights are damaged")


class LastIsDamaged(RecordingWorker):
    """A worker that cannot load its weights if it is the last one. Rank 0 waits for it as in a
    collective, and complains much later."""

    def load(self) -> WorkerReady:
        if self.rank == self.place.ranks - 1:
            raise ModelError(f"weights of rank {self.rank} are damaged")
        time.sleep(600)
        raise EngineDeadError("the last rank did not come")
