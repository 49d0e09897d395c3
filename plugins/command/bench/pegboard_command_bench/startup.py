"""`pegboard bench startup`: measures the time until a model is loaded, each time in a fresh
process.

Cold: the files of the checkpoint are not in the operating system's file cache, if the system can be
asked to drop them. Warm: they are in the cache.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pegboard.errors import PegboardError, UsageError
from pegboard.interfaces.command import CommandSetup
from pegboard_command_bench.results import engine_parser, percentiles, write_json

CHILD = """
import pickle, sys, time
started = time.perf_counter()
from pegboard import LLM
llm = LLM.from_settings(pickle.load(sys.stdin.buffer))
print("seconds", time.perf_counter() - started)
llm.shutdown()
"""
"""The code of a fresh process. It measures from the first import of Pegboard until the engine can
take requests."""


def main(words: Sequence[str], setup: CommandSetup) -> int:
    """Measure and print the result. Pegboard compiles nothing at start-up, so the compilation times
    are 0."""
    parser = engine_parser(
        setup, "startup", "Measure the seconds until a model is loaded, in fresh processes."
    )
    parser.add_argument(
        "--num-iters-cold",
        type="number",
        default=3,
        help="starts with cold files (default %(default)s)",
    )
    parser.add_argument(
        "--num-iters-warmup",
        type="number",
        default=1,
        help="starts before the warm ones (default %(default)s)",
    )
    parser.add_argument(
        "--num-iters-warm",
        type="number",
        default=3,
        help="starts with warm files (default %(default)s)",
    )
    settings, arguments = parser.parse_settings(words, {"engine": {"disable_log_stats": True}})
    if arguments.num_iters_cold < 1 or arguments.num_iters_warm < 1:
        raise UsageError("--num-iters-cold and --num-iters-warm must be at least 1")
    from tqdm import tqdm

    files = setup.model_files(settings)  # download the model now, so that no download is measured
    total = arguments.num_iters_cold + arguments.num_iters_warmup + arguments.num_iters_warm
    with tqdm(total=total, desc="Starts", file=sys.stderr, disable=arguments.disable_tqdm) as bar:
        cold = [_start(settings, bar, files) for _ in range(arguments.num_iters_cold)]
        for _ in range(arguments.num_iters_warmup):
            _start(settings, bar)
        warm = [_start(settings, bar) for _ in range(arguments.num_iters_warm)]
    result = {**_phase("cold", cold), **_phase("warm", warm)}
    for name, values in (("Cold", cold), ("Warm", warm)):
        print(
            f"{name} startup: avg {np.mean(values):.2f} s, median {np.median(values):.2f} s, max "
            f"{max(values):.2f} s"
        )
    if arguments.output_json:
        write_json(arguments.output_json, result)
    return 0


def _phase(name: str, values: list[float]) -> dict[str, Any]:
    zeros = [0.0] * len(values)
    return {
        f"avg_{name}_startup_time": float(np.mean(values)),
        f"{name}_startup_times": values,
        f"{name}_startup_percentiles": percentiles(values),
        f"avg_{name}_compilation_time": 0.0,
        f"{name}_compilation_times": zeros,
        f"{name}_compilation_percentiles": percentiles(zeros),
    }


def _forget(files: Iterable[Path]) -> None:
    """Ask the operating system to drop the files from its cache. It may ignore this."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _start(settings: Any, bar: Any, cold: Iterable[Path] = ()) -> float:
    _forget(cold)
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=pickle.dumps(settings), capture_output=True
    )
    lines = [
        line
        for line in done.stdout.decode("utf-8", "replace").splitlines()
        if line.startswith("seconds ")
    ]
    if done.returncode != 0 or not lines:
        raise PegboardError(
            f"the engine did not start:\n{done.stderr.decode('utf-8', 'replace')[-2000:]}"
        )
    bar.update(1)
    return float(lines[-1].split()[1])
