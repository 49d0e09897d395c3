"""Whether Triton can be imported. The device itself is the platform's to probe."""

from __future__ import annotations

from importlib.util import find_spec

from pegboard.interfaces.spec import Absent, Ok, ProbeFacts, Verdict


def probe(facts: ProbeFacts) -> Verdict:
    """Return Ok if Triton is installed."""
    return (
        Ok()
        if find_spec("triton") is not None
        else Absent("triton is not installed: pip install triton")
    )
