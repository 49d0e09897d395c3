"""Engines on the nodes of Ray, for `--data-parallel-backend ray`. An actor runs the command of
each. What the engine says goes over a connection of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from pegboard.interfaces.executor import LaunchSetup
from pegboard_executor_ray.cluster import Cluster, no_room
from pegboard_executor_ray.node import needs_of, this_node, variables
from pegboard_executor_ray.options import RayOptions

LEAVE_S = 2.0
"""Seconds in which the commands of engines that were told to end have ended."""


class Command:
    """Runs `pegboard` on a node. `run` waits in one thread, and `end` comes in another."""

    _process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Answer as soon as there is room for the actor."""

    def run(self, words: Sequence[str], values: Mapping[str, str]) -> int:
        """Return the exit code. values: variables of the environment."""
        command = [sys.executable, "-m", "pegboard", *words]
        self._process = subprocess.Popen(command, env={**os.environ, **values})
        return self._process.wait()

    def end(self) -> None:
        """Tell the process to end. It would outlive an actor that is killed."""
        if self._process is not None:
            self._process.terminate()


class Launched(NamedTuple):
    """begun: is done when there is room for the actor. timer: says that there is none."""

    actor: Any
    begun: Future[None]
    timer: threading.Timer


class RayLauncher:
    """Implements `pegboard.interfaces.executor.Launcher`."""

    def __init__(self, options: RayOptions | None, setup: LaunchSetup) -> None:
        self._options = options or RayOptions()
        self._setup = setup
        self._cluster = Cluster(self._options)
        self._values = {**variables(), **setup.variables}
        rank = needs_of(setup.num_threads, setup.platform)
        self._needs = {name: amount * setup.num_ranks for name, amount in rank.items()}
        self._running: dict[Future[int], Launched] = {}

    def connect(self) -> str:
        self._cluster.connect(int(self._needs["CPU"]))
        here = this_node()
        return str(next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == here))

    def launch(self, words: Sequence[str], on_end: Callable[[str], None]) -> None:
        remote: Any = ray.remote
        make = remote(
            num_cpus=self._needs["CPU"],
            num_gpus=self._needs["GPU"],
            max_restarts=0,
            max_concurrency=2,
            scheduling_strategy="SPREAD",
        )(Command)
        actor = make.remote()
        is_late = partial(self._has_no_room, on_end)
        timer = threading.Timer(self._options.placement_timeout_s, is_late)
        timer.daemon = True
        timer.start()
        begun: Future[None] = actor.begin.remote().future()
        begun.add_done_callback(lambda _: timer.cancel())
        run: Future[int] = actor.run.remote(list(words), self._values).future()
        self._running[run] = Launched(actor, begun, timer)
        run.add_done_callback(partial(self._has_ended, on_end))

    def stop(self) -> None:
        running = self._running
        self._running = {}
        for launched in running.values():
            launched.timer.cancel()
        commands = {run for run, launched in running.items() if launched.begun.done()}
        commands = wait(commands, LEAVE_S).not_done
        if ray.is_initialized():
            for run in commands:
                running[run].actor.end.remote()
            wait(commands, LEAVE_S)
            for launched in running.values():
                ray.kill(launched.actor)
        self._cluster.close()

    def _has_no_room(self, on_end: Callable[[str], None]) -> None:
        on_end(no_room("an engine", self._needs, self._options))

    def _has_ended(self, on_end: Callable[[str], None], run: Future[int]) -> None:
        """Tell the server, and forget the actor. Ray ends actors that nobody knows."""
        if (launched := self._running.pop(run, None)) is not None:
            launched.timer.cancel()
        error = run.exception()
        if isinstance(error, RayError):
            reason = f"Ray could not run it: {error}"
        else:
            reason = f"its process on a node of Ray has ended with code {run.result()}"
        on_end(f"{reason}; Ray's log has its output")
