"""Measures start-up: the imports, and the command's help. Servers are measured in servers.py."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

PEGBOARD = str(Path(sys.executable).parent / "pegboard")


def import_ms(module: str, times: int) -> float:
    """Returns the median milliseconds of `import module` in a fresh interpreter, without the
    interpreter's own start."""
    code = (
        f"import time; t = time.perf_counter(); import {module}; print(1e3 * (time.perf_counter() "
        "- t))"
    )
    return statistics.median(
        float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(times)
    )


def help_ms(times: int) -> float:
    """Returns the median milliseconds of `pegboard --help`, for the whole process."""
    return statistics.median(_run_ms([PEGBOARD, "--help"]) for _ in range(times))


def _run_ms(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return 1e3 * (time.perf_counter() - started)
