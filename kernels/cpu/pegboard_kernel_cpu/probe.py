"""Whether compiled kernels can be had on this machine."""

from __future__ import annotations

import sys

from pegboard.interfaces.spec import Absent, Ok, ProbeFacts, Verdict
from pegboard_kernel_cpu.build import compiler, level_of, library_path


def probe(facts: ProbeFacts) -> Verdict:
    """A library compiled earlier, or a C compiler to make one with at first use."""
    if not sys.platform.startswith("linux"):
        return Absent(f"compiled kernels are made for Linux; this is {facts.system}")
    level = level_of(facts.cpu_flags)
    if library_path(level).exists():
        return Ok({"level": level, "library": "compiled"})
    found = compiler()
    if found is None:
        return Absent("no C compiler was found (cc, gcc or clang) and no library was compiled before: apt install gcc")
    return Ok({"level": level, "library": f"to be compiled with {found}"})
