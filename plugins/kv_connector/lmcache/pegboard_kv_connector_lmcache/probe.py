"""Whether the library is installed."""

from __future__ import annotations

from importlib.util import find_spec

from pegboard.interfaces.spec import Absent, Ok, ProbeFacts


def probe(facts: ProbeFacts) -> Ok | Absent:
    if find_spec("lmcache") is None:
        return Absent("the library lmcache is not installed: pip install lmcache")
    return Ok()
