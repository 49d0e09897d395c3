"""A sample of the campaign of kills (kills.py). `make nightly` runs it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import kills

ROUNDS = [
    kills.Round("engine", signal.SIGSEGV, "decode", wait=0.1),
    kills.Round("group", signal.SIGKILL, "prefill", num_apis=2),
    kills.Round("api", signal.SIGSTOP, "decode", num_apis=2, wait=0.0),
]
"""The last server goes on and answers, and removes what the killed group left."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_clients_of_a_killed_server_get_an_end_and_nothing_stays(tmp_path: Path) -> None:
    # a busy machine is slow
    assert kills.run(ROUNDS, tmp_path / "kills", limit_s=60, num_clients=4) == []
