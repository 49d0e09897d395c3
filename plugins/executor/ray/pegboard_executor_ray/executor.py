"""Every rank is an actor of Ray, on this machine or on the nodes of a cluster.

A batch is pickled once, and every rank gets the same bytes. The first rank that samples returns the
result of a step. What the others return is only looked at when it arrives. The answers of all ranks
arrive in one queue, which the engine's thread reads.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pegboard.data.batch import Batch, StepOutput, TokenMasks
from pegboard.data.transfers import TransferMerger
from pegboard.errors import EngineDeadError, PegboardError
from pegboard.interfaces.executor import ExecutorSetup, Place, WorkerDeath, WorkerReady
from pegboard_executor_ray import node
from pegboard_executor_ray.cluster import Cluster, Seat
from pegboard_executor_ray.node import needs_of, on_node, variables
from pegboard_executor_ray.options import RayOptions
from pegboard_executor_ray.rank import GROUPS, Rank
from pegboard_executor_ray.watch import Watch, Watched, reason_of
from pegboard_executors.answers import dumped
from pegboard_executors.questions import Question, Step

DEATH_S = 1.0
"""Seconds in which those who watch a rank whose call has failed say why it is dead."""

LEAVE_S = 1.0
"""Seconds in which ranks stop their workers by themselves."""

INLINE_BYTES = 64 << 10
"""A larger message is put into Ray's shared memory once, instead of into the call of each rank."""


class Arrival(NamedTuple):
    """The answer of a rank to a question, or an error of Ray."""

    number: int
    rank: int
    future: Future[bytes]


class RayExecutor:
    def __init__(self, options: RayOptions | None, setup: ExecutorSetup) -> None:
        self._setup = setup
        self._cluster = Cluster(options or RayOptions())
        self._seats: list[Seat] = []
        self._actors: list[Any] = []
        self._watched: list[Watched] = []
        self._watch: Watch | None = None
        self._folder = ""
        self._on_death: Callable[[WorkerDeath], None] | None = None
        self._arrivals: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._num_questions = 0
        self._questions: dict[int, Question] = {}
        self._late_error: BaseException | None = None
        self._transfers = TransferMerger(setup.ranks)

    # --- start and stop ---------------------------------------------------------------------------

    def start(self) -> list[WorkerReady]:
        setup = self._setup
        make_worker = dumped(setup.make_worker)  # before anything starts, because it may fail
        check = dumped(setup.check_plugins)
        needs = needs_of(setup.num_threads, setup.platform)
        try:
            self._cluster.connect(int(needs["CPU"] * setup.ranks))
            self._seats = self._cluster.seats(setup.ranks, needs)
            self._actors = [self._new_actor(seat, needs) for seat in self._seats]
            gpus = self._prepare(check)
            places = self._places()
            message = shared(make_worker)
            starts = [
                partial(actor.start.remote, message, place, setup.sampling, gpus[seat.node])
                for actor, place, seat in zip(self._actors, places, self._seats, strict=True)
            ]
            ready = self._settled(self._ask(starts, setup.ranks, is_hasty=True)).result()
        except BaseException:
            self.stop()
            raise
        self._remove_folder()
        return [ready[rank] for rank in range(setup.ranks)]

    def _new_actor(self, seat: Seat, needs: dict[str, float]) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            self._cluster.group, placement_group_bundle_index=seat.bundle
        )
        remote: Any = ray.remote  # its types do not know concurrency groups
        make = remote(
            num_cpus=needs["CPU"],
            num_gpus=needs["GPU"],
            concurrency_groups=GROUPS,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )(Rank)
        return make.remote()

    def _prepare(self, check: bytes) -> dict[str, str]:
        """Wait for the processes of all ranks, and watch them. Return node → its GPUs, in the order
        of its ranks."""
        calls = [
            partial(actor.prepare.remote, f"worker {rank}", sys.path, variables(), check)
            for rank, actor in enumerate(self._actors)
        ]
        number = self._ask(calls, len(calls), is_hasty=False)
        answers = self._settled(number).result()
        gpus: dict[str, list[str]] = {seat.node: [] for seat in self._seats}
        for rank, (actor, seat) in enumerate(zip(self._actors, self._seats, strict=True)):
            pid, numbers = answers[rank]
            gpus[seat.node] += numbers
            life = actor.live.remote().future()
            self._watched.append(Watched(actor, seat.node, pid, life))
        self._watch = Watch(self._watched, self._wake)
        if self._on_death is not None:
            self._watch.tell(self._on_death)
        return {seat: ",".join(numbers) for seat, numbers in gpus.items()}

    def _places(self) -> list[Place]:
        """Return where each rank runs, and where all of them meet."""
        nodes = [seat.node for seat in self._seats]
        ranks = len(nodes)
        address = ""
        if len(set(nodes)) > 1:
            address = on_node(nodes[0], node.free_address)
        elif ranks > 1:
            self._folder = on_node(nodes[0], node.make_folder)
            address = (Path(self._folder) / "meet").as_uri()
        return [
            Place(rank, ranks, rank - nodes.index(each), nodes.count(each), address)
            for rank, each in enumerate(nodes)
        ]

    def watch(self, on_death: Callable[[WorkerDeath], None]) -> None:
        self._on_death = on_death
        if self._watch is not None:
            self._watch.tell(on_death)

    def _wake(self) -> None:
        """End all ranks, which would wait for the dead one, and wake the engine's thread."""
        for actor in self._actors:
            ray.kill(actor)
        self._arrivals.put(None)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        if self._actors and ray.is_initialized():
            self._end_ranks()
        self._actors.clear()
        self._watched.clear()
        self._seats.clear()
        self._questions.clear()
        self._cluster.close()

    def _end_ranks(self) -> None:
        leaving = [actor.leave.remote() for actor in self._actors]
        ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)
        for actor in self._actors:
            ray.kill(actor)
        wait([watched.life for watched in self._watched], LEAVE_S)
        # Ray says that a process has ended a little before it has, and does not end stopped ones
        for each in {watched.node for watched in self._watched}:
            pids = [watched.pid for watched in self._watched if watched.node == each]
            with contextlib.suppress(RayError):  # the node is gone
                on_node(each, node.end_processes, pids)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder:
            with contextlib.suppress(RayError):  # the node is gone
                on_node(self._seats[0].node, node.remove_folder, self._folder)
            self._folder = ""

    # --- steps and calls --------------------------------------------------------------------------

    def submit(self, batch: Batch) -> Step:
        message = shared(dumped(batch))
        steps = [partial(actor.step.remote, message) for actor in self._actors]
        return Step(partial(self.output_of, self._ask(steps, 1, is_hasty=True)))

    def output_of(self, number: int) -> StepOutput:
        """Wait for the result of a step. It has the reports of all ranks on transfers."""
        output: StepOutput = self._settled(number).result()[self._setup.sampling.start]
        output.transfers = self._transfers.take()
        return output

    def provide_masks(self, step: int, masks: TokenMasks) -> None:
        self._raise_late_error()
        message = shared(dumped((step, masks)))
        for rank in self._setup.sampling:
            self._actors[rank].provide_masks.remote(message)

    def call(self, method: str, *args: object) -> list[object]:
        message = shared(dumped((method, *args)))
        calls = [partial(actor.call.remote, message) for actor in self._actors]
        answers = self._settled(self._ask(calls, len(calls), is_hasty=False)).result()
        return [answers[rank] for rank in range(len(calls))]

    def _ask(self, calls: Iterable[Callable[[], Any]], needs: int, *, is_hasty: bool) -> int:
        """Call a method of each rank. Return the number of the question."""
        self._raise_late_error()
        self._num_questions += 1
        number = self._num_questions
        self._questions[number] = Question(needs, self._setup.ranks, is_hasty=is_hasty)
        for rank, call in enumerate(calls):
            arrive = partial(self._arrive, number, rank)
            call().future().add_done_callback(arrive)
        return number

    def _arrive(self, number: int, rank: int, future: Future[bytes]) -> None:
        self._arrivals.put(Arrival(number, rank, future))

    def _settled(self, number: int) -> Question:
        """Wait for the answers to a question, and forget it."""
        question = self._questions.get(number)
        if question is None:
            raise EngineDeadError("the workers were stopped before they answered")
        try:
            while not question.is_settled():
                self._raise_late_error()
                with contextlib.suppress(queue.Empty):
                    self._take(self._arrivals.get(timeout=question.patience_s()))
        finally:
            self._questions.pop(number, None)
        return question

    def _take(self, arrival: Arrival | None) -> None:
        """Look at what a rank has answered."""
        if arrival is None:
            self._raise_death()
        kind, value = self._content(arrival)
        question = self._questions.get(arrival.number)
        if kind == "transfers":
            self._transfers.add(arrival.rank, value)
        elif question is not None and kind != "done":
            question.take(arrival.rank, kind == "error", value)
            if isinstance(value, StepOutput):
                self._transfers.add(arrival.rank, value.transfers)
        elif kind == "error":
            self._late_error = self._late_error or value

    def _content(self, arrival: Arrival) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(arrival.future.result())
        except RayActorError as error:
            self._raise_death(WorkerDeath(arrival.rank, reason_of(error)))
        except RayError as error:
            return "error", PegboardError(f"Ray: {' '.join(str(error).split())}")
        return kind, value

    def _raise_late_error(self) -> None:
        """Raise the error of a rank in a step that has already been answered."""
        error = self._late_error
        self._late_error = None
        if error is not None:
            raise error

    def _raise_death(self, fallback: WorkerDeath | None = None) -> NoReturn:
        """A rank has died. fallback: what its call says, if nobody has noticed more."""
        death = (self._watch.reason(DEATH_S) if self._watch is not None else None) or fallback
        assert death is not None, "the engine is only woken by a death"
        raise EngineDeadError(f"worker {death.rank} died: {death.reason}")


def shared(message: bytes) -> Any:
    """Return a message as it is passed to several actors."""
    return ray.put(message) if len(message) > INLINE_BYTES else message
