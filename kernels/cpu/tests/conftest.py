"""Every test here runs on every level this CPU can run, compiled as it would be on a CPU that has no more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pegboard_kernel_cpu import build
from pegboard_kernel_cpu.library import Library, using

LEVELS = build.levels_of(build.cpu_flags())

if build.compiler() is None:
    collect_ignore_glob = ["test_*.py"]


TEAMS = [(level, 2) for level in LEVELS] + [(LEVELS[0], 1), (LEVELS[0], 3)]


@pytest.fixture(scope="module", params=TEAMS, ids=lambda team: f"{team[0]}-{team[1]}")
def native(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The library of one level with a team of some threads, in place of the process's own."""
    with using(*request.param) as library:
        yield library
