"""A sample of the campaign over damaged caches (damaged_caches.py). `make nightly` runs it, in a
process of its own, which forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pegboard_kernel_cpu")
SAMPLE = 9


@pytest.mark.slow
def test_a_start_on_a_damaged_cache_gives_the_right_answer() -> None:
    command = [
        sys.executable,
        str(Path(__file__).with_name("damaged_caches.py")),
        "--count",
        str(SAMPLE),
        "--seed",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr[-5000:]
    starts = [int(line.split("|")[2]) for line in done.stdout.splitlines()[2:]]
    assert len(starts) == 3 and sum(starts) >= SAMPLE
