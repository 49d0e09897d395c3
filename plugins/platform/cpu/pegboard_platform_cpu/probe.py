"""Whether Pegboard can run on this CPU. The probe only reads facts, and does not import torch."""

from __future__ import annotations

from importlib.util import find_spec

from pegboard.env import usable_cpus
from pegboard.interfaces.spec import Absent, Ok, ProbeFacts, Verdict
from pegboard_platform_cpu.quota import cpu_quota
from pegboard_platform_cpu.topology import memory_nodes, num_cores

LEVELS = ("amx_int8", "avx512_vnni", "avx512f", "avx_vnni", "avx2")


def probe(facts: ProbeFacts) -> Verdict:
    """Return Ok if torch is installed: every machine has a CPU."""
    if find_spec("torch") is None:
        return Absent("torch is not installed: pip install torch")
    cpus = usable_cpus()
    level = next((flag for flag in LEVELS if flag in facts.cpu_flags), facts.machine)
    return Ok(
        {
            "level": level,
            "cpus": facts.num_cpus,
            "cores": num_cores(cpus),
            "memory nodes": len(memory_nodes(cpus)) or 1,
            "quota of cores": cpu_quota() or "none",
            "bfloat16": has_bfloat16(facts),
        }
    )


def has_bfloat16(facts: ProbeFacts) -> bool:
    """True if the CPU has instructions for products of bfloat16."""
    return bool({"avx512_bf16", "amx_bf16"} & facts.cpu_flags)
