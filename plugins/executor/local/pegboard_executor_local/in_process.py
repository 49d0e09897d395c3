"""One rank in the engine's process.

A step that is submitted alone runs when its result is requested, in the thread that requests it.
Steps that are submitted ahead run in order in a separate thread. The engine can then prepare the
next step and deliver the tokens of the last one while kernels compute, because kernels release the
interpreter lock.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

from pegboard.data.batch import Batch, StepOutput, TokenMasks
from pegboard.interfaces.executor import ExecutorSetup, Place, WorkerDeath, WorkerLike, WorkerReady

SWITCH_S = 0.0005
"""How long the engine's thread may keep the interpreter lock when the thread of steps wants it.
Python's usual 5 ms can be longer than a step."""


class Step:
    """A submitted step."""

    def __init__(self, executor: "InProcessExecutor", batch: Batch) -> None:
        self.executor = executor
        self.batch = batch
        self.masks: TokenMasks | None = None
        self.masks_given = threading.Event()
        self.ran = threading.Event()
        self.wait: Callable[[], StepOutput] | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Compute the step. An exception is kept for `result` to raise."""
        try:
            self.wait = self.executor.worker.run(
                self.batch, self._masks if self.batch.needs_masks else None
            )
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self.error = error
        finally:
            self.ran.set()

    def _masks(self) -> TokenMasks:
        if self.executor.thread is not None:
            self.masks_given.wait()
        assert self.masks is not None, (
            "provide_masks() must be called before the result of the step is requested"
        )
        return self.masks

    def result(self) -> StepOutput:
        if self.executor.thread is None and not self.ran.is_set():
            self.run()
        self.ran.wait()
        if self.error is not None:
            raise self.error
        assert self.wait is not None
        return self.wait()


class InProcessExecutor:
    def __init__(self, options: None, setup: ExecutorSetup, place: Place | None = None) -> None:
        self.worker: WorkerLike = setup.make_worker(place or Place())
        self.thread: threading.Thread | None = None
        self.submitted: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self.last: Step | None = None
        self.masked: dict[int, Step] = {}

    def start(self) -> list[WorkerReady]:
        return [self.worker.load()]

    def submit(self, batch: Batch) -> Step:
        step = self.new_step(batch)
        if batch.needs_masks:
            self.masked[batch.step] = step
        if self.thread is None and self.last is not None and not self.last.ran.is_set():
            self.submitted.put(self.last)
            sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
            self.thread = threading.Thread(
                target=self._run_steps, name="pegboard-steps", daemon=True
            )
            self.thread.start()
        self.last = step
        if self.thread is not None:
            self.submitted.put(step)
        return step

    def new_step(self, batch: Batch) -> Step:
        return Step(self, batch)

    def provide_masks(self, step: int, masks: TokenMasks) -> None:
        masked = self.masked.pop(step)
        masked.masks = masks
        masked.masks_given.set()

    def call(self, method: str, *args: object) -> list[object]:
        if self.thread is not None and self.last is not None:
            self.last.ran.wait()
        return [self.worker.call(method, *args)]

    def watch(self, on_death: Callable[[WorkerDeath], None]) -> None:
        """Do nothing: the worker cannot die without this process."""

    def stop(self) -> None:
        if self.thread is not None:
            for step in self.masked.values():  # these results will not be requested any more
                step.masks_given.set()
            self.submitted.put(None)
            # it is, if garbage collection calls stop() in that thread
            if self.thread is not threading.current_thread():
                self.thread.join()
            self.thread = None
        self.worker.stop()

    def _run_steps(self) -> None:
        while (step := self.submitted.get()) is not None:
            step.run()
