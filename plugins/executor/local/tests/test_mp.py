"""The executor that starts a process for each rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from pegboard_executor_local.processes import ProcessExecutor

from pegboard.data.batch import TransferReport
from pegboard.engine.boundary.spawn import Child
from pegboard.engine.life import Life
from pegboard.errors import ConfigError, EngineDeadError, PegboardError, PluginBroken
from pegboard.interfaces.executor import ExecutorSetup
from pegboard_testing.contract_executor import (
    SOON_S,
    ExecutorContract,
    RecordingWorker,
    is_running,
    make_batch,
)
from pegboard_testing.recording_worker import LASTS, make_masks

sys.path.insert(0, str(Path(__file__).parent))  # for this process and those of the ranks

import mp_workers

KILLED = """
import os, signal, sys, threading, time
import mp_workers
from pegboard.engine.boundary.spawn import Child
from pegboard.interfaces.executor import ExecutorSetup
from pegboard_executor_local.processes import ProcessExecutor
executor = ProcessExecutor(None, ExecutorSetup(mp_workers.Slow, 2, Child))
threading.Thread(target=executor.start, daemon=True).start()
while len(executor._children) < 2:
    time.sleep(0.01)
print(executor._folder, *(child.pid for child in executor._children), flush=True)
time.sleep(float(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


class TestOneRank(ExecutorContract):
    def executor(self, setup: ExecutorSetup) -> ProcessExecutor:
        return ProcessExecutor(None, setup)


@pytest.mark.sampled(4)
class TestTwoRanks(TestOneRank):
    ranks = 2
    sampling = range(2)


@pytest.mark.sampled(4)
class TestTwoStages(TestOneRank):
    ranks = 3
    sampling = range(1, 3)


@contextmanager
def running(worker: type[RecordingWorker], ranks: int = 2) -> Iterator[ProcessExecutor]:
    executor = ProcessExecutor(None, ExecutorSetup(worker, ranks, Child))
    executor.start()
    try:
        yield executor
    finally:
        executor.stop()


def wait_until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process that is not a child of this one has ended. Whoever inherits it may leave it
    as a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def test_an_engine_that_starts_no_processes_is_told_so() -> None:
    executor = ProcessExecutor(None, ExecutorSetup(RecordingWorker, 2))
    with pytest.raises(ConfigError, match="mp starts a process for each rank"):
        executor.start()
    executor.stop()


# --- what crosses ---------------------------------------------------------------------------------


def test_errors_and_values_cross() -> None:
    with running(mp_workers.Outspoken) as executor:
        with pytest.raises(PluginBroken, match="it is broken") as broken:
            executor.call("plugin")
        assert broken.value.plugin == "sampler:x"
        with pytest.raises(LookupError, match="no such value"):
            executor.call("value")
        with pytest.raises(PegboardError, match="^OddError: an odd error$"):
            executor.call("odd")
        with pytest.raises(PegboardError, match="answer of a worker cannot be sent.*a function"):
            executor.call("function")
        with pytest.raises(Exception, match="pickle"):
            executor.call("memory", lambda: None)
        assert executor.call("memory") == [("memory", 0), ("memory", 1)]


def test_large_messages_in_both_directions_do_not_block_each_other() -> None:
    """The engine takes answers while it sends, because a rank reads nothing while it answers."""
    with running(mp_workers.Large) as executor:
        steps = []
        for number in range(1, 7):
            batch = make_batch(number)
            batch.rows = np.full(1_000_000, number, np.int32)
            steps.append(executor.submit(batch))
        for number, step in enumerate(steps, 1):
            assert step.result().rows.sum() == number * 1_000_000


def test_a_transfer_has_ended_when_all_ranks_have_reported_it() -> None:
    with running(mp_workers.Transferring) as executor:
        for number in (1, 2):
            output = executor.submit(make_batch(number)).result()
            assert output.transfers == {"c": TransferReport([], [], {})}
        saved: list[str] = []
        for number in range(3, 1000):
            saved += executor.submit(make_batch(number)).result().transfers["c"].saved
            if saved:
                break
            time.sleep(0.005)  # the other rank reports when it gets to it
        assert saved == ["a"]


# --- the order of steps ---------------------------------------------------------------------------


def test_steps_start_before_earlier_ones_are_awaited() -> None:
    with running(mp_workers.Asynchronous) as executor:
        # the others arrive while the first one waits for its masks
        steps = [executor.submit(make_batch(n, needs_masks=n == 1)) for n in (1, 2, 3)]
        executor.provide_masks(1, make_masks(0))
        histories = [step.result().token_ids.row(0).tolist() for step in steps]
        assert histories[2] == [1, 2, 3, -1, -2, -3]


def test_a_step_that_waits_for_masks_does_not_hold_back_earlier_results() -> None:
    """The engine computes the masks from them."""
    with running(mp_workers.Asynchronous) as executor:
        first = executor.submit(make_batch(1))
        second = executor.submit(make_batch(2, needs_masks=True))
        assert first.result().step == 1
        executor.provide_masks(2, make_masks(6))
        assert second.result().rows.tolist() == [6]


# --- deaths ---------------------------------------------------------------------------------------


def test_a_rank_that_leaves_is_dead() -> None:
    with (
        running(mp_workers.Outspoken) as executor,
        pytest.raises(EngineDeadError, match="^worker 1 died: code 3$"),
    ):
        executor.call("leave")


def test_a_death_counts_more_than_its_consequences() -> None:
    with running(mp_workers.Collective) as executor:
        step = executor.submit(make_batch(1))
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="^worker 1 died: signal SIGKILL$"):
                step.result()


def test_the_engine_names_the_worker_once() -> None:
    with running(RecordingWorker) as executor:
        life = Life({"pegboard_executor_local": "executor:mp"}, executor)
        (_, pid) = executor.call("pid")
        os.kill(int(str(pid)), signal.SIGKILL)
        wait_until(lambda: life.end is not None)
        expected = "^the engine is dead: executor:mp reports that worker 1 died: signal SIGKILL$"
        with pytest.raises(EngineDeadError, match=expected):
            life.check()


def test_a_late_watcher_learns_of_an_earlier_death() -> None:
    with running(RecordingWorker) as executor:
        (pid, _) = executor.call("pid")
        os.kill(int(str(pid)), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="worker 0 died"):
            executor.submit(make_batch(LASTS)).result()
        ranks: list[int] = []
        executor.watch(lambda death: ranks.append(death.rank))
        assert ranks == [0]


def test_ranks_ignore_sigterm() -> None:
    """A service manager sends it to all processes. Running requests finish first."""
    with running(RecordingWorker) as executor:
        for pid in executor.call("pid"):
            os.kill(int(str(pid)), signal.SIGTERM)
        assert executor.submit(make_batch(1)).result().step == 1


def test_four_ranks_that_hang_end_at_the_same_time() -> None:
    with running(RecordingWorker, 4) as executor:
        pids = [int(str(pid)) for pid in executor.call("pid")]
        executor.submit(make_batch(LASTS))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # not even SIGUSR1 ends them
        began = time.monotonic()
        executor.stop()
        assert time.monotonic() - began < SOON_S
        assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_nothing_is_left_when_the_engine_is_killed_while_it_loads(after_s: float) -> None:
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(after_s)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    folder, *pids = process.stdout.decode().split()
    assert len(pids) == 2
    wait_until(lambda: all(has_ended(int(pid)) for pid in pids))
    wait_until(lambda: not Path(folder).exists())
