"""Whether FlashInfer can be used, without importing it. The device is the platform's to probe."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from pegboard.interfaces.attention import AttentionNeed
from pegboard.interfaces.spec import Absent, Broken, Ok, ProbeFacts, Verdict

OLDEST = (0, 2)
"""The first version in which `plan` takes the scale, the window and the soft cap."""


def probe(facts: ProbeFacts) -> Verdict:
    """Return Ok if FlashInfer is installed and new enough."""
    try:
        installed = version("flashinfer-python")
    except PackageNotFoundError:
        return Absent("FlashInfer is not installed: install the library flashinfer-python")
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Broken(f"FlashInfer {installed} is too old: {oldest} or newer is needed")
    return Ok({"flashinfer": installed})


def suits(need: AttentionNeed) -> list[str]:
    """Return the reasons against this need: the cache has the queries' type."""
    if need.kv_dtype in (None, need.dtype) or need.dtype is None:
        return []
    return [f"a cache of {need.kv_dtype} is not read with queries of {need.dtype}"]
