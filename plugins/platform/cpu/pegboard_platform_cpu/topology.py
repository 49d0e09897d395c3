"""Which CPUs are of one core, and which memory is near them, as Linux lists it below /sys."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Collection
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The number of the system call, by machine."""
INTERLEAVE = 3
"""MPOL_INTERLEAVE of set_mempolicy(2)."""
WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


def num_cores(cpus: Collection[int], system: Path = SYSTEM) -> int:
    """Return how many cores these CPUs are of. A core with two hardware threads is two CPUs. CPUs
    of which nothing is listed count as cores."""
    cores = set()
    for cpu in cpus:
        listed = _read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(frozenset(listed) or frozenset({cpu}))
    return max(1, len(cores))


def memory_nodes(cpus: Collection[int], system: Path = SYSTEM) -> list[int]:
    """Return the numbers of the nodes (of NUMA) that these CPUs are of. [] = there are none."""
    folders = system.glob("node/node[0-9]*")
    nodes = {int(folder.name.removeprefix("node")): _read(folder / "cpulist") for folder in folders}
    return sorted(node for node, members in nodes.items() if members & set(cpus))


def interleave(nodes: Collection[int]) -> bool:
    """Have the pages that this thread, and threads that it starts, use first taken from these nodes
    in turn. Returns False if the system cannot or may not do so."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    words = [0] * (max(nodes) // WORD + 1)
    for node in nodes:
        words[node // WORD] |= 1 << node % WORD
    mask = (ctypes.c_ulong * len(words))(*words)
    # the system reads one bit less than it is told
    count = ctypes.c_ulong(WORD * len(words) + 1)
    call = ctypes.CDLL(None).syscall
    return bool(call(ctypes.c_long(number), ctypes.c_int(INTERLEAVE), mask, count) == 0)


def _read(path: Path) -> set[int]:
    """Return the numbers of a list such as "0-3,8". A missing or damaged list is empty."""
    try:
        parts = path.read_text("ascii").strip().split(",")
        spans = [part.partition("-") for part in parts if part]
        return {
            number
            for first, _, last in spans
            for number in range(int(first), int(last or first) + 1)
        }
    except (OSError, ValueError):
        return set()
