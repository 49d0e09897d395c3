"""Whether this machine can run compiled kernels."""

from __future__ import annotations

import sys

from pegboard.interfaces.spec import Absent, Ok, ProbeFacts, Verdict
from pegboard_kernel_cpu.build import compiler, failure, levels_of, library_path, usable_levels


def probe(facts: ProbeFacts) -> Verdict:
    """ok when a library was compiled earlier, or when a C compiler can make one at first use."""
    if not sys.platform.startswith("linux"):
        return Absent(f"compiled kernels run on Linux only; this is {facts.system}")
    failed = {level: reason for level in levels_of(facts.cpu_flags) if (reason := failure(level)) is not None}
    usable = usable_levels(facts.cpu_flags)
    if not usable:
        return Absent("; ".join(f"kernels of level {level} do not work here: {reason}" for level, reason in failed.items()))
    level = usable[0]
    notes = {"passed over": "; ".join(f"{name}: {reason}" for name, reason in failed.items())} if failed else {}
    if library_path(level).exists():
        return Ok({"level": level, "library": "compiled", **notes})
    found = compiler()
    if found is None:
        return Absent("no C compiler was found (cc, gcc or clang) and no library was compiled before: apt install gcc")
    return Ok({"level": level, "library": f"will be compiled with {found}", **notes})


def probe_onednn(facts: ProbeFacts) -> Verdict:
    """oneDNN is a part of torch's builds for x86; its blocked layout was measured to be faster there."""
    if facts.machine.lower() not in ("x86_64", "amd64"):
        return Absent(f"measured on x86 only; this is {facts.machine}")
    return Ok()
