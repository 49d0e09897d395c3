"""Whether torch has the flex_attention that this package calls. The device is the platform's to
probe."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from pegboard.interfaces.spec import Absent, Broken, Ok, ProbeFacts, Verdict

OLDEST = (2, 9)
"""The first torch whose flex_attention has `return_aux`."""


def probe(facts: ProbeFacts) -> Verdict:
    """Return Ok if torch is new enough. Only its metadata is read."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return Absent("torch is not installed: pip install torch")
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Broken(f"flex_attention needs torch {oldest} or newer, and {installed} is installed")
    return Ok()
