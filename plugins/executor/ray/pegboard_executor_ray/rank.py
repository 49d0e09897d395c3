"""The actor of one rank: a worker that does what the calls of the engine's process say.

All calls that use the worker run in one thread of the actor, in the order in which they were made.
Masks arrive in another thread, because a step that runs waits for them. Two more threads are there
for those who watch the actor.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from pegboard import env
from pegboard.data.batch import TokenMasks
from pegboard.interfaces.executor import Place, WorkerLike
from pegboard.log import set_up_logging
from pegboard_executors.answers import answer_of, error_of, result_of

GROUPS = {"worker": 1, "masks": 1, "pings": 1, "life": 1}
"""The threads of the actor → how many there are."""

NOTHING = ("done", None)
"""The engine wants to know no more of the step of a rank."""

GPUS = "CUDA_VISIBLE_DEVICES"
AMD_GPUS = "HIP_VISIBLE_DEVICES"
"""Ray sets it on nodes with AMD GPUs. There, it counts instead of the other."""


def show_gpus(gpus: str) -> None:
    """Let this process use these GPUs of its node. gpus: "" = none were asked for."""
    if gpus:
        names = (GPUS, AMD_GPUS) if AMD_GPUS in os.environ else (GPUS,)
        os.environ.update(dict.fromkeys(names, gpus))


class Rank:
    """The methods that return bytes return the pickle of (kind, value). kind: "answer", "transfers"
    (the reports of a rank that does not answer steps), "done" (it has none) or "error"."""

    def __init__(self) -> None:
        self.worker: WorkerLike | None = None
        self.samples = False
        self.answers = False
        self.masks: dict[int, TokenMasks] = {}
        self.has_masks = threading.Condition()

    @ray.method(concurrency_group="worker")
    def prepare(
        self, role: str, path: Sequence[str], environment: Mapping[str, str], check: bytes
    ) -> bytes:
        """Set up the process, and check its plugins. path: where the engine finds modules.
        environment: the engine's variables that ranks read. check: the pickle of a function without
        arguments. The answer has the process, and the GPUs that Ray gives to it."""
        # Ray sets it to the CPUs of the bundle, but ranks share the cores of their node
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(environment)
        sys.path += [folder for folder in path if folder not in sys.path]
        set_up_logging(env.log_level(), role)
        return self._answer(lambda: self._checked(check))

    def _checked(self, check: bytes) -> tuple[int, list[str]]:
        pickle.loads(check)()
        return os.getpid(), [str(number) for number in ray.get_gpu_ids()]

    @ray.method(concurrency_group="worker")
    def start(self, make_worker: bytes, place: Place, sampling: range, gpus: str) -> bytes:
        """Build the worker, and load the weights. gpus: those of all ranks of this node, in their
        order; "" = none."""
        show_gpus(gpus)
        self.samples = place.rank in sampling
        self.answers = place.rank == sampling.start
        return self._answer(lambda: self._loaded(make_worker, place))

    def _loaded(self, make_worker: bytes, place: Place) -> object:
        self.worker = pickle.loads(make_worker)(place)
        return self._worker.load()

    @property
    def _worker(self) -> WorkerLike:
        assert self.worker is not None, "the worker was not started"
        return self.worker

    @ray.method(concurrency_group="worker")
    def step(self, pickled: bytes) -> bytes:
        """Run a batch."""
        try:
            batch = pickle.loads(pickled)
            needs_masks = batch.needs_masks and self.samples
            masks = (lambda: self._masks_of(batch.step)) if needs_masks else None
            output = self._worker.run(batch, masks)()
        except BaseException as error:  # noqa: BLE001 - the engine raises it
            return error_of(error)
        return answer_of(*(result_of(output, self.answers) or NOTHING))

    @ray.method(concurrency_group="masks")
    def provide_masks(self, pickled: bytes) -> None:
        """Hand over the masks of a step."""
        step, masks = pickle.loads(pickled)
        with self.has_masks:
            self.masks[step] = masks
            self.has_masks.notify_all()

    def _masks_of(self, step: int) -> TokenMasks:
        with self.has_masks:
            self.has_masks.wait_for(lambda: step in self.masks)
            return self.masks.pop(step)

    @ray.method(concurrency_group="worker")
    def call(self, pickled: bytes) -> bytes:
        """Call a method of the worker."""
        return self._answer(lambda: self._worker.call(*pickle.loads(pickled)))

    @ray.method(concurrency_group="pings")
    def ping(self) -> None:
        """Show that the process is not stopped."""

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Do nothing until the process ends. The caller then learns that it has ended."""
        threading.Event().wait()

    @ray.method(concurrency_group="worker")
    def leave(self) -> None:
        """Stop the worker."""
        if self.worker is not None:
            self.worker.stop()

    def _answer(self, function: Callable[[], Any]) -> bytes:
        try:
            answer = function()
        except BaseException as error:  # noqa: BLE001 - the engine raises it
            return error_of(error)
        return answer_of("answer", answer)
