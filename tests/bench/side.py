"""A side of the comparison: a process that holds one loaded model and answers jobs, one JSON line
each.

The process (side_*.py) prints {"ready": …} after its first token, then reads a job per line. All
sides stay alive at the same time so that their turns can alternate; a waiting side computes
nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

HERE = Path(__file__).parent


class SideFailed(Exception):
    """A side ended before it answered; the message contains the end of its log."""


def _environment() -> dict[str, str]:
    """Return the environment of this process, without what an engine sets for its own threads:
    llama.cpp takes three times as long with it."""
    return {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}


class Side:
    """One side. name: the peer and the format of its weights. start_s: seconds from the start of
    the process to its first token."""

    def __init__(
        self,
        name: str,
        python: str,
        script: str,
        arguments: list[str],
        environment: Mapping[str, str] | None = None,
    ):
        self.name = name
        path = f"{gettempdir()}/pegboard-bench-{os.getpid()}-{name.replace(' ', '-')}.log"
        self._log = open(path, "w+", encoding="utf-8")  # noqa: SIM115  read on failure
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [python, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**_environment(), **(environment or {})},
        )
        try:
            self._read()
        except SideFailed:
            self.stop()
            raise
        self.start_s = time.perf_counter() - started

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Run one job. Raises SideFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        return self._read()

    def peak_rss_mib(self) -> float:
        """The largest resident memory so far, summed over the process and its children."""
        return sum(map(_peak_rss_kib, process_tree(self._process.pid))) / 1024

    def stop(self) -> None:
        """End the process and remove its log."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
        Path(self._log.name).unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        """Returns the next JSON line. Skips what libraries print to stdout, after it in its line
        too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.JSONDecoder().raw_decode(line)[0])
        self._fail()
        raise AssertionError

    def _fail(self) -> None:
        self._process.wait(20)
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-15:])
        raise SideFailed(
            f"{self.name} ended with status {self._process.returncode}; its log ends:\n{tail}"
        )


def process_tree(pid: int) -> list[int]:
    """Returns pid and all processes below it."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue  # the thread has just ended
        for child in children:
            found += process_tree(int(child))
    return found


def _peak_rss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    return 0
