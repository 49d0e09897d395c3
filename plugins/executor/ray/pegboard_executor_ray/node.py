"""What is done on the node of a rank: in this process if it is this node, else in a task of Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

GPU_PLATFORMS = ("cuda", "rocm")

PATIENCE_S = 2.0
"""Seconds in which processes that were told to end have ended."""

TASK_S = 5.0
"""Seconds to wait for a task on another node."""


def this_node() -> str:
    """Return the id of the node of this process."""
    return str(ray.get_runtime_context().get_node_id())


def on_node(node: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this module on a node. Raises errors of Ray if the node does not answer
    within TASK_S seconds."""
    if node == this_node():
        return function(*arguments)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    remote: Any = ray.remote  # its types do not know this strategy
    task = remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(function)
    return ray.get(task.remote(*arguments), timeout=TASK_S)


def needs_of(num_threads: int | None, platform: str) -> dict[str, float]:
    """Return what a rank needs of its node."""
    num_gpus = 1.0 if platform in GPU_PLATFORMS else 0.0
    return {"CPU": float(num_threads or 1), "GPU": num_gpus}


def variables() -> dict[str, str]:
    """Return the variables of the environment that ranks read, so that all nodes have the same."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PEGBOARD") or name == "OMP_NUM_THREADS"
    }


def make_folder() -> str:
    return tempfile.mkdtemp(prefix="pegboard-ranks-")


def remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def free_address() -> str:
    """Return an address of this node at which nobody listens."""
    host = str(ray.util.get_node_ip_address())
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def state(pid: int) -> str:
    """Return the letter that Linux gives to the state of a process; "" = there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[0]


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped with SIGSTOP or SIGTSTP."""
    return state(pid) == "T"


def end_processes(pids: Sequence[int]) -> None:
    """Wait until processes that were told to end are gone. Kill those that do not end."""
    patience = time.monotonic() + PATIENCE_S
    limit = patience + PATIENCE_S
    while (rest := [pid for pid in pids if state(pid)]) and time.monotonic() < limit:
        for pid in rest:
            if is_stopped(pid) or time.monotonic() > patience:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
