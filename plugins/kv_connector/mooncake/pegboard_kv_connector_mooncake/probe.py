"""Whether the library is installed."""

from __future__ import annotations

from importlib.util import find_spec

from pegboard.interfaces.spec import Absent, Ok, ProbeFacts

INSTALL = (
    "pip install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda without CUDA; it "
    "needs libibverbs.so.1 (libibverbs1 of Debian)"
)


def probe(facts: ProbeFacts) -> Ok | Absent:
    if find_spec("mooncake") is None:
        return Absent(f"the library mooncake is not installed: {INSTALL}")
    return Ok()
