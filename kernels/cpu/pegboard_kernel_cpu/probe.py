"""Probes: whether this machine can run compiled kernels, and whether it profits from oneDNN's
layout."""

from __future__ import annotations

import sys

from pegboard.interfaces.spec import Absent, Ok, ProbeFacts, Verdict
from pegboard_kernel_cpu.build import compiler, failure, find, levels_of, obstacle, usable_levels


def probe(facts: ProbeFacts) -> Verdict:
    """Return Ok if a library was compiled earlier, or if there is a C compiler, and a folder with
    room, to compile one at first use."""
    if not sys.platform.startswith("linux"):
        return Absent(f"compiled kernels run on Linux only; this is {facts.system}")
    failed = {
        level: reason
        for level in levels_of(facts.cpu_flags)
        if (reason := failure(level)) is not None
    }
    usable = usable_levels(facts.cpu_flags)
    if not usable:
        return Absent(
            "; ".join(
                f"kernels of level {level} fail on this machine: {reason}"
                for level, reason in failed.items()
            )
        )
    level = usable[0]
    notes = (
        {"passed over": "; ".join(f"{name}: {reason}" for name, reason in failed.items())}
        if failed
        else {}
    )
    if find(level) is not None:
        return Ok({"level": level, "library": "compiled", **notes})
    program = compiler()
    if program is None:
        return Absent(
            "no C compiler was found (cc, gcc or clang) and no library was compiled before: apt "
            "install gcc"
        )
    if (reason := obstacle()) is not None:
        return Absent(
            f"no folder can take the compiled library ({reason}): free some space, or set "
            "PEGBOARD_CACHE"
        )
    return Ok({"level": level, "library": f"will be compiled with {program}", **notes})


def probe_onednn(facts: ProbeFacts) -> Verdict:
    """Return Ok on x86, where torch includes oneDNN and its blocked layout was measured to be
    faster."""
    if facts.machine.lower() not in ("x86_64", "amd64"):
        return Absent(f"its speed was measured on x86 only; this is {facts.machine}")
    return Ok()
