"""Whether Ray is installed."""

from __future__ import annotations

from importlib.util import find_spec

from pegboard.interfaces.spec import Absent, Ok, Verdict


def probe(facts: object) -> Verdict:
    if find_spec("ray") is None:
        return Absent("Ray is not installed: pip install 'ray>=2.40'")
    return Ok()
