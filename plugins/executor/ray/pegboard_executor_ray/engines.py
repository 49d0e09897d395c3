"""Engines on the nodes of Ray, for `--data-parallel-backend ray`. An actor runs the command of
each. What the engine says goes over a connection of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from pegboard.interfaces.executor import LaunchSetup
from pegboard_executor_ray.cluster import Cluster, no_room
from pegboard_executor_ray.node import this_node, variables
from pegboard_executor_ray.options import RayOptions

GPU_PLATFORMS = ("cuda", "rocm")

LEAVE_S = 2.0
"""Seconds in which the commands of engines that were told to end have ended."""


class Command:
    """Runs `pegboard` on a node."""

    def begin(self, values: Mapping[str, str]) -> None:
        """Set variables of the environment."""
        os.environ.update(values)

    def run(self, words: Sequence[str]) -> int:
        """Return the exit code."""
        return subprocess.run([sys.executable, "-m", "pegboard", *words], check=False).returncode


class RayLauncher:
    """Implements `pegboard.interfaces.executor.Launcher`."""

    def __init__(self, options: RayOptions | None, setup: LaunchSetup) -> None:
        self._options = options or RayOptions()
        self._setup = setup
        self._cluster = Cluster(self._options)
        self._values = {**variables(), **setup.variables}
        self._needs = {
            "CPU": float((setup.num_threads or 1) * setup.num_ranks),
            "GPU": float(setup.num_ranks if setup.platform in GPU_PLATFORMS else 0),
        }
        self._actors: dict[int, Any] = {}
        self._runs: dict[int, Future[int]] = {}
        self._timers: dict[int, threading.Timer] = {}

    def connect(self) -> str:
        self._cluster.connect(int(self._needs["CPU"]))
        here = this_node()
        return str(next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == here))

    def launch(self, engine: int, words: Sequence[str]) -> None:
        remote: Any = ray.remote
        make = remote(
            num_cpus=self._needs["CPU"],
            num_gpus=self._needs["GPU"],
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )(Command)
        actor = make.remote()
        timer = threading.Timer(
            self._options.placement_timeout_s, partial(self._has_no_room, engine)
        )
        timer.daemon = True
        timer.start()
        self._actors[engine] = actor
        self._timers[engine] = timer
        actor.begin.remote(self._values).future().add_done_callback(lambda _: timer.cancel())
        run: Future[int] = actor.run.remote(list(words)).future()
        self._runs[engine] = run
        run.add_done_callback(partial(self._has_ended, engine))

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        wait(self._runs.values(), LEAVE_S)
        if ray.is_initialized():
            for actor in [*self._actors.values()]:
                ray.kill(actor)
        self._cluster.close()

    def _has_no_room(self, engine: int) -> None:
        self._setup.on_end(engine, no_room("an engine", self._needs, self._options))

    def _has_ended(self, engine: int, run: Future[int]) -> None:
        """Tell the server, and forget the actor, which ends it."""
        self._actors.pop(engine, None)
        self._timers[engine].cancel()
        error = run.exception()
        if isinstance(error, RayError):
            reason = f"Ray could not run it: {error}"
        else:
            reason = f"its process on a node of Ray has ended with code {run.result()}"
        self._setup.on_end(engine, f"{reason}; Ray's log has its output")
