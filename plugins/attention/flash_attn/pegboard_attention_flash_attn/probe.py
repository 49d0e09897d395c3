"""Whether flash-attn can be used, without importing it. The device is the platform's to probe."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from pegboard.interfaces.attention import AttentionNeed
from pegboard.interfaces.spec import Absent, Broken, Ok, ProbeFacts, Verdict

OLDEST = (2, 6)
"""The first version whose function has a soft cap and a block table."""


def probe(facts: ProbeFacts) -> Verdict:
    """Return Ok if flash-attn is installed with its compiled kernels, and new enough."""
    try:
        installed = version("flash-attn")
    except PackageNotFoundError:
        return Absent("flash-attn is not installed: install the library flash-attn")
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Broken(f"flash-attn {installed} is too old: {oldest} or newer is needed")
    if find_spec("flash_attn_2_cuda") is None:
        return Broken(f"flash-attn {installed} was installed without its kernels for CUDA")
    return Ok({"flash-attn": installed})


def suits(need: AttentionNeed) -> list[str]:
    """Return the reasons against this need: the library reads a cache of the queries' type only."""
    if need.kv_dtype in (None, need.dtype) or need.dtype is None:
        return []
    return [f"a cache of {need.kv_dtype} cannot be read with queries of {need.dtype}"]
