"""Whether this machine has the device. A probe only reads facts: no torch, no device context."""

from __future__ import annotations

import os
from importlib.util import find_spec

from pegboard.env import usable_cpus
from pegboard.interfaces.spec import Absent, Ok, ProbeFacts, Verdict
from pegboard_platform_slice.memory import STATUS


def probe(facts: ProbeFacts) -> Verdict:
    """Return Ok where threads can be bound to CPUs and the system tells what a process takes."""
    if find_spec("torch") is None:
        return Absent("torch is not installed: pip install torch")
    if not hasattr(os, "sched_setaffinity"):
        return Absent("this system cannot bind threads to CPUs; Linux can")
    if not STATUS.exists():
        return Absent(f"{STATUS} is missing, which tells how much memory a process takes")
    return Ok({"cpus": len(usable_cpus()), "of": facts.num_cpus})
