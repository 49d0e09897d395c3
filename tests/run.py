"""Runs the tests in three processes, which take the next file when they have finished one. `make
test`, `make nightly` and `make check` call it.

    python tests/run.py                      every test that is not marked slow; the slowest are
                                             listed at the end
    python tests/run.py --nightly            every test
    python tests/run.py ARGUMENTS OF PYTEST  these tests, in one process
    python tests/run.py --changed [COMMIT]   the tests near to what differs from a commit (HEAD if
                                             none is named), at most about three minutes; the tests
                                             of this repository's rules are always part of them
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "tests/house"
PYTEST = (sys.executable, "-m", "pytest", "-q")
PROCESSES = ("-n", "3", "--dist", "loadfile")
"""One more than CI has cores: tests of servers and commands wait for other processes."""
NOT_SLOW = ("-m", "not slow")
SLOWEST = ("--durations=50", "--durations-min=1")
CHECK_S = 150.0
"""No test of `--changed` starts later than this."""
CHECK_FILES = 120
"""The largest number of test files of `--changed`: collecting them takes time too."""


def main(words: list[str]) -> int:
    if not words:
        return _pytest(*PROCESSES, *SLOWEST, *NOT_SLOW)
    if words == ["--nightly"]:
        return _pytest(*PROCESSES, *SLOWEST)
    if words[0] == "--changed":
        return check(words[1] if len(words) > 1 else "HEAD")
    return _pytest(*words)


def check(base: str) -> int:
    """Runs the tests near to a change, nearest first."""
    sys.path.insert(0, str(HOUSE))
    from changed import changed_paths, near

    until = time.time() + CHECK_S
    house = sorted(HOUSE.glob("test_*.py"))
    found = [file for _, file in near(changed_paths(base)) if file not in house]
    files = [*house, *found[: CHECK_FILES - len(house)]]
    print(
        (
            f"{len(files)} of {len(found) + len(house)} test files near to the change; `make "
            "test` runs all"
        ),
        flush=True,
    )
    names = [str(file.relative_to(ROOT)) for file in files]
    return _pytest(
        *PROCESSES, "--no-loadscope-reorder", *NOT_SLOW, "--until", f"{until:.0f}", *names
    )


def _pytest(*words: str) -> int:
    """Runs pytest and keeps its bytecode, which halves the time that the next run needs to collect
    the tests."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    return subprocess.run([*PYTEST, *words], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
