"""Contract tests of the kind `executor`. A plugin's test file:

    class TestMyExecutor(ExecutorContract):
        def executor(self, setup: ExecutorSetup) -> Executor:
            return MyExecutor(None, setup)

The worker in these tests is `RecordingWorker`. Its answers contain its history, so the executor may
run it in any process. As core's own, it can be made in another process: `make_worker` can be
pickled. If the executor divides a model among several ranks, its test file has a second class, with
`ranks = 2`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.data.batch import StepOutput
from pegboard.engine.boundary.spawn import Child
from pegboard.errors import ConfigError, EngineDeadError, ModelError
from pegboard.interfaces.executor import (
    Executor,
    ExecutorSetup,
    Place,
    WorkerDeath,
    WorkerLike,
)
from pegboard_testing.fake_model import fake_kv_spec
from pegboard_testing.recording_worker import (
    FAILS,
    FAILS_ON_LAST,
    LASTS,
    DamagedWorker,
    LastIsDamaged,
    RecordingWorker,
    make_batch,
    make_masks,
)

__all__ = ["ExecutorContract", "RecordingWorker", "make_batch"]

SOON_S = 30.0
"""Seconds in which a death must be noticed. Executors are faster, but test machines may be slow."""


class ExecutorContract:
    """Every executor passes these. Override `executor`, and for an executor of several ranks also
    `ranks` and `sampling`, the ranks that sample."""

    ranks = 1
    sampling = range(1)

    def executor(self, setup: ExecutorSetup) -> Executor:
        """Return a new executor that is not started."""
        raise AssertionError("override ExecutorContract.executor")

    def setup(self, make_worker: Callable[[Place], WorkerLike] = RecordingWorker) -> ExecutorSetup:
        return ExecutorSetup(make_worker, self.ranks, Child, self.sampling)

    @pytest.fixture
    def started(self) -> Any:
        """Yield an executor that is stopped after the test, as the engine does."""
        executor = self.executor(self.setup())
        executor.start()
        yield executor
        executor.stop()

    def history(self, output: StepOutput) -> list[int]:
        return output.token_ids.row(0).tolist()

    def mask(self, output: StepOutput) -> int:
        return int(output.rows[0])

    def test_start_reports_the_ranks(self) -> None:
        executor = self.executor(self.setup())
        try:
            ready = executor.start()
            assert [(r.rank, r.kv_memory_bytes) for r in ready] == [
                (rank, 1000 + rank) for rank in range(self.ranks)
            ]
            assert all(r.kv_specs == {0: fake_kv_spec()} for r in ready)
        finally:
            executor.stop()

    def test_a_failed_start_raises_what_the_worker_raised(self) -> None:
        executor = self.executor(self.setup(DamagedWorker))
        with pytest.raises(ModelError, match="weights are damaged"):
            executor.start()
        executor.stop()

    def test_steps_run_in_the_order_of_submission(self, started: Executor) -> None:
        """Several steps may be in flight, and their results may be read in any order."""
        futures = {step: started.submit(make_batch(step)) for step in (1, 2, 3, 4)}
        outputs = {step: futures[step].result() for step in (3, 1, 4, 2)}
        assert {step: out.step for step, out in outputs.items()} == {1: 1, 2: 2, 3: 3, 4: 4}
        assert [self.history(outputs[step]) for step in (1, 2, 3, 4)] == [
            [1],
            [1, 2],
            [1, 2, 3],
            [1, 2, 3, 4],
        ]

    def test_a_result_can_be_had_again(self, started: Executor) -> None:
        future = started.submit(make_batch(1))
        first = future.result()
        assert future.result() is first
        assert self.history(started.submit(make_batch(2)).result()) == [1, 2], (
            "asking again must not run the step again"
        )

    def test_masks_reach_their_step_and_no_other(self, started: Executor) -> None:
        first = started.submit(make_batch(1, needs_masks=True))
        plain = started.submit(make_batch(2))
        second = started.submit(make_batch(3, needs_masks=True))
        started.provide_masks(1, make_masks(7))
        started.provide_masks(3, make_masks(9))
        assert [self.mask(future.result()) for future in (second, plain, first)] == [9, -1, 7]

    def test_the_first_rank_that_samples_has_the_result(self, started: Executor) -> None:
        for step in (1, 2):
            future = started.submit(make_batch(step, needs_masks=True))
            started.provide_masks(step, make_masks(step + 5))
            output = future.result()
            assert output.draft_token_ids is not None
            assert (
                output.draft_token_ids.lists() == [[self.sampling.start]]
                and self.mask(output) == step + 5
            )

    def test_masks_may_come_after_their_step(self, started: Executor) -> None:
        future = started.submit(make_batch(1, needs_masks=True))
        started.provide_masks(1, make_masks(5))
        assert self.mask(future.result()) == 5

    def test_an_error_belongs_to_its_step(self, started: Executor) -> None:
        """`result` raises the error of the step each time it is called. Other steps are not
        affected."""
        before, failing, after = (started.submit(make_batch(step)) for step in (1, FAILS, 14))
        assert self.history(after.result()) == [1, FAILS, 14]
        for _ in range(2):
            with pytest.raises(ModelError, match="step 13 fails"):
                failing.result()
        assert self.history(before.result()) == [1]

    def test_calls_reach_the_worker(self, started: Executor) -> None:
        ranks = range(self.ranks)
        assert started.call("warm_up") == [("warm_up", rank) for rank in ranks]
        assert started.call("allocate", 4, "x") == [("allocate", rank, 4, "x") for rank in ranks]

    def test_an_error_in_a_call_is_raised_and_the_executor_goes_on(self, started: Executor) -> None:
        with pytest.raises(ConfigError, match="cannot do that"):
            started.call("fail")
        with pytest.raises(ConfigError, match=f"rank {self.ranks - 1} cannot do that"):
            started.call("fail_on_last")
        assert self.history(started.submit(make_batch(1)).result()) == [1]

    def test_stop_may_come_again_and_at_any_time(self) -> None:
        """It may be stopped before the start, with steps in flight, and twice. An orderly stop does
        not count as a death."""
        deaths: list[WorkerDeath] = []
        never_started = self.executor(self.setup())
        never_started.stop()
        executor = self.executor(self.setup())
        executor.watch(deaths.append)
        executor.start()
        executor.submit(make_batch(1))
        executor.submit(make_batch(2, needs_masks=True))
        executor.stop()
        executor.stop()
        assert deaths == []

    # --- several ranks ----------------------------------------------------------------------------

    def test_ranks_have_places(self, started: Executor) -> None:
        places = [answer for answer in started.call("place") if isinstance(answer, Place)]
        assert [(place.rank, place.ranks) for place in places] == [
            (rank, self.ranks) for rank in range(self.ranks)
        ]
        assert len({place.address for place in places}) == 1
        assert bool(places[0].address) == (self.ranks > 1)

    def test_the_cause_of_a_failed_start_is_raised_at_once(self) -> None:
        executor = self.executor(self.setup(LastIsDamaged))
        with pytest.raises(ModelError, match=f"weights of rank {self.ranks - 1} are damaged"):
            executor.start()
        executor.stop()

    def test_an_error_of_the_last_rank_surfaces(self, started: Executor) -> None:
        """It is raised by its step, or by a later one if the others were done before."""
        with pytest.raises(ModelError, match=f"step 17 fails on rank {self.ranks - 1}"):
            for step in (FAILS_ON_LAST, *range(20, 1000)):
                started.submit(make_batch(step)).result()
                time.sleep(0.01)

    @pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
    @pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
    def test_a_death_is_noticed_and_named(
        self, started: Executor, name: str, is_busy: bool
    ) -> None:
        """Of each rank. The others end too, and whoever waits learns why."""
        if self.ranks == 1 and started.call("pid") == [os.getpid()]:
            return
        for rank in range(self.ranks):
            executor = self.executor(self.setup()) if rank else started
            if rank:
                executor.start()
            try:
                self._check_death(executor, rank, signal.Signals[name], is_busy)
            finally:
                executor.stop()

    def _check_death(
        self, executor: Executor, rank: int, number: signal.Signals, is_busy: bool
    ) -> None:
        deaths: list[WorkerDeath] = []
        is_noticed = threading.Event()

        def note(death: WorkerDeath) -> None:
            deaths.append(death)
            is_noticed.set()

        executor.watch(note)
        pids = [pid for pid in executor.call("pid") if isinstance(pid, int)]
        step = executor.submit(make_batch(LASTS if is_busy else 1))
        if not is_busy:
            step.result()
        os.kill(pids[rank], number)
        how = "SIGKILL" if number == signal.SIGKILL else "is stopped"
        expected = f"worker {rank} died: .*{how}"
        if is_busy:
            with pytest.raises(EngineDeadError, match=expected):
                step.result()
        assert is_noticed.wait(SOON_S)
        for ask in (lambda: executor.submit(make_batch(2)).result(), lambda: executor.call("pid")):
            with pytest.raises(EngineDeadError, match=expected):
                ask()
        assert [death.rank for death in deaths] == [rank]
        assert how in deaths[0].reason
        executor.stop()
        assert len(deaths) == 1
        assert not any(is_running(pid) for pid in pids)

    def test_stop_leaves_nothing(self) -> None:
        """No process, no thread, no file descriptor and no folder, even if a step never ends."""
        before = remains()
        executor = self.executor(self.setup())
        executor.start()
        pids = [pid for pid in executor.call("pid") if isinstance(pid, int)]
        (place, *_) = executor.call("place")
        if pids != [os.getpid()]:
            executor.submit(make_batch(LASTS))
        executor.stop()
        assert not any(is_running(pid) for pid in pids if pid != os.getpid())
        if isinstance(place, Place) and place.address.startswith("file://"):
            assert not Path(place.address.removeprefix("file://")).parent.exists()
        del executor
        assert all(now <= then for now, then in zip(remains(), before, strict=True))


def is_running(pid: int) -> bool:
    """Whether there is a process of this number, be it a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def remains() -> tuple[int, int]:
    """Return the number of threads and of open file descriptors of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))
