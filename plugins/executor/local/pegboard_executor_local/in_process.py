"""One rank, in the engine's own process and thread: the step runs when its result is asked for, in order of submission."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pegboard.batch import Batch, StepOutput, TokenMasks
from pegboard.interfaces.executor import ExecutorSetup, WorkerDeath, WorkerReady


class Step:
    """A submitted step. Running a step runs the ones submitted before it first."""

    def __init__(self, executor: "InProcessExecutor", batch: Batch) -> None:
        self.executor = executor
        self.batch = batch
        self.masks: TokenMasks | None = None
        self.output: StepOutput | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.output is not None or self.error is not None

    def run(self) -> None:
        """Compute now; keeps what was raised for `result`."""
        try:
            self.output = self.executor.worker.run(self.batch, self._masks if self.batch.needs_masks else None)
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            self.error = error

    def _masks(self) -> TokenMasks:
        assert self.masks is not None, "masks are provided before the result of their step is asked for"
        return self.masks

    def result(self) -> StepOutput:
        while not self.done():
            self.executor.waiting.popleft().run()
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output


class InProcessExecutor:
    def __init__(self, options: None, setup: ExecutorSetup) -> None:
        self.worker = setup.make_worker(0)
        self.waiting: deque[Step] = deque()
        self.masked: dict[int, Step] = {}

    def start(self) -> list[WorkerReady]:
        return [self.worker.load()]

    def submit(self, batch: Batch) -> Step:
        step = Step(self, batch)
        self.waiting.append(step)
        if batch.needs_masks:
            self.masked[batch.step] = step
        return step

    def provide_masks(self, step: int, masks: TokenMasks) -> None:
        self.masked.pop(step).masks = masks

    def call(self, method: str, *args: object, ranks: Sequence[int] | None = None) -> list[object]:
        if ranks is not None and 0 not in ranks:
            return []
        return [self.worker.call(method, *args)]

    def watch(self, on_death: Callable[[WorkerDeath], None]) -> None:
        """The worker cannot die without this process."""

    def stop(self) -> None:
        self.worker.stop()
