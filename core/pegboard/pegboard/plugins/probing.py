"""Runs probes: what of this machine a plugin may look at, and what its answer is worth.

A probe looks at `ProbeFacts` and cheap facts like files; it touches no device and imports nothing heavy, so it runs in place.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path

from pegboard.interfaces.spec import Absent, Broken, Ok, ProbeFacts, Verdict


@cache
def probe_facts() -> ProbeFacts:
    """The facts of this machine. cpu_flags as /proc/cpuinfo names them (x86 "flags", Arm "Features"); empty where there is
    no /proc. num_cpus counts the CPUs this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    num_cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return ProbeFacts(machine=platform.machine(), system=platform.system(), cpu_flags=_cpu_flags(), num_cpus=num_cpus)


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def run_probe(probe: Callable[[ProbeFacts], Verdict]) -> Verdict:
    """The probe's verdict; a probe that raises or answers nonsense is Broken."""
    try:
        verdict = probe(probe_facts())
    except Exception as error:  # noqa: BLE001  a probe must not raise; if it does, that is its verdict
        return Broken(f"the probe raised {type(error).__name__}: {error}")
    if not isinstance(verdict, Ok | Absent | Broken):
        return Broken(f"the probe returned {verdict!r}, expected Ok, Absent or Broken")
    return verdict
