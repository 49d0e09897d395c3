"""Levels other than this CPU's own take minutes to compile and run. So `make test` runs the lower
ones, and of the emulated ones the highest of x86 and of Arm, only if what they are made of has
changed since all of them last passed.

    python kernels/cpu/tests/emulated_levels.py    runs them, and if they pass, notes it
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from pegboard_kernel_cpu import build

EMULATION = Path(__file__).parent / "emulated"
PASSED = Path(__file__).with_name("emulated_passed.txt")
"""The digest of the sources with which the levels of `HIGHEST` and `LOWER` have passed."""

HIGHEST = ("amx", "neon_i8mm")
"""Emulated levels."""
LOWER = ("avx2", "plain")
"""Levels that CPUs with a higher one have too."""


def digest() -> str:
    """Return the digest of the kernels' sources, of their emulation and of how they are built."""
    module = Path(build.__file__)
    sources = sorted([*(module.parent / "csrc").glob("*.[ch]"), *EMULATION.glob("*.h"), module])
    parts = (f"{path.name}\0".encode() + path.read_bytes() for path in sources)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def have_passed() -> bool:
    """Return whether all have passed with the sources of today."""
    return PASSED.is_file() and PASSED.read_text("utf-8").strip() == digest()


def main() -> int:
    PASSED.unlink(missing_ok=True)
    before = digest()
    names = [*(f"emulated_{level}" for level in HIGHEST), *(f"{level}-2" for level in LOWER)]
    chosen = " or ".join(names)
    words = ["-m", "pytest", "-q", str(Path(__file__).parent), "-k", chosen]
    ended = subprocess.run([sys.executable, *words], env=os.environ, check=False)
    if ended.returncode == 0:
        PASSED.write_text(f"{before}\n", "utf-8")
    return ended.returncode


if __name__ == "__main__":
    raise SystemExit(main())
