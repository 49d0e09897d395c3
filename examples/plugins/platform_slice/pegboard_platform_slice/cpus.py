"""Lists of CPUs."""

from __future__ import annotations

from collections.abc import Sequence


def numbers(text: str) -> list[int]:
    """Return the CPUs of a list like "0-3,8", in ascending order. Raises ValueError."""
    result: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        stop = last if dash else first
        if not (first.isdecimal() and stop.isdecimal() and int(first) <= int(stop)):
            raise ValueError(f"{text!r} is no list of CPUs; one looks like 0-3,8")
        result.update(range(int(first), int(stop) + 1))
    return sorted(result)


def share(cpus: Sequence[int], rank: int, num_ranks: int) -> list[int]:
    """Return the CPUs of one of the ranks of a host: neighbors, because they share caches. If there
    are more ranks than CPUs, some ranks have the same one."""
    size = max(1, len(cpus) // num_ranks)
    start = rank % num_ranks * size % len(cpus)
    return list(cpus[start : start + size])
