"""Every test in this folder runs on the levels that this CPU supports, compiled as on a CPU that
supports no higher level (`make test` leaves some out: see SLOW). It also runs on the levels above
AVX2 that this CPU lacks, and on those of Arm, with their instructions emulated (see emulated/).
Only the best level is compiled with full optimization, as it is for users: the others are compiled
with -O1, in a quarter of the time."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pegboard_kernel_cpu import build
from pegboard_kernel_cpu.library import Library, using

from pegboard.env import cpu_flags

sys.path.insert(0, str(Path(__file__).parent))

from emulated_levels import EMULATION, HIGHEST, LOWER, have_passed

LEVELS = build.levels_of(cpu_flags())
X86_EMULATED = {
    level: (f"-DEMULATE={number}", *build.LEVELS["avx2"])
    for number, level in enumerate(("avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"))
    if "avx2" in LEVELS and level not in LEVELS
}
ARM_EMULATED = {
    "neon": ("-D__ARM_NEON",),
    "neon_dotprod": ("-D__ARM_NEON", "-D__ARM_FEATURE_DOTPROD"),
    "neon_i8mm": ("-D__ARM_NEON", "-D__ARM_FEATURE_DOTPROD", "-D__ARM_FEATURE_MATMUL_INT8"),
}
EMULATED = X86_EMULATED if "neon" in LEVELS else {**X86_EMULATED, **ARM_EMULATED}
"""Level → switches that emulate it."""

if build.compiler() is None:
    collect_ignore_glob = ["test_*.py"]


TEAMS = [(level, 2) for level in LEVELS] + [(LEVELS[0], 1), (LEVELS[0], 3)]
TEAMS += [(f"emulated_{level}", 2) for level in EMULATED]
DAILY = () if have_passed() else HIGHEST
SLOW = (
    *(f"emulated_{level}" for level in EMULATED if level not in DAILY),
    *({"avx512", "avx512_vnni"} - {LEVELS[0]}),
    *({*LOWER} - {LEVELS[0]} if have_passed() else ()),
)
"""`make nightly` runs them. Higher levels share their code, but for products of bytes without VNNI,
of bfloat16 numbers without their dot products and, in the AMX level, of 16 tokens or more; plain
neon multiplies bytes in another way.
neon_i8mm uses neon_dotprod's products for an odd number of tokens. See `emulated_levels`."""


def parameter(team: tuple[str, int]) -> Any:
    return pytest.param(
        team, id=f"{team[0]}-{team[1]}", marks=[pytest.mark.slow] if team[0] in SLOW else []
    )


@pytest.fixture(scope="module", params=map(parameter, TEAMS))
def native(request: pytest.FixtureRequest) -> Iterator[Library]:
    """Replaces the process's library by the library of one level, with its own team of threads."""
    # so that a change compiles again
    headers = b"".join(path.read_bytes() for path in sorted(EMULATION.iterdir()))
    digest = hashlib.sha256(headers).hexdigest()[:16]
    with pytest.MonkeyPatch.context() as patch:
        for level in LEVELS[1:]:
            patch.setitem(build.LEVELS, level, (*build.LEVELS[level], "-O1"))
        for level, switches in EMULATED.items():
            emulating = (f"-I{EMULATION}", f"-DEMULATION=0x{digest}", *switches, "-O1")
            patch.setitem(build.LEVELS, f"emulated_{level}", emulating)
        with using(*request.param) as library:
            yield library
