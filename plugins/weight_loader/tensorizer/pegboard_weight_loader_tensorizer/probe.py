"""Whether the library is installed."""

from __future__ import annotations

from importlib.util import find_spec

from pegboard.interfaces.spec import Absent, Ok, ProbeFacts


def probe(facts: ProbeFacts) -> Ok | Absent:
    if find_spec("tensorizer") is None:
        return Absent("the library tensorizer is not installed: pip install tensorizer")
    return Ok()
