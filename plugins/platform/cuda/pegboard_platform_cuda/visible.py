"""What CUDA_VISIBLE_DEVICES shows, read as CUDA and torch read it."""

from __future__ import annotations

import re
from collections.abc import Sequence

INTEGER = re.compile(r"[+-]?[0-9]+")
"""CUDA reads the number that an entry begins with."""


def part_of_gpu(variable: str | None) -> str | None:
    """Return the UUID of the part of a GPU (MIG) that is visible, or None if the variable names
    none. CUDA uses one part, whatever the number in the list."""
    first = (variable or "").split(",")[0].strip()
    return first if first.startswith("MIG-") else None


def visible_gpus(variable: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the places of the visible GPUs in `uuids`, in CUDA's order.

    variable: indices, or UUIDs ("GPU-…") and beginnings of them; None = not set, all are visible.
    An entry that is no GPU, or that several UUIDs begin with, ends the list. A GPU that is listed
    twice makes it empty."""
    if variable is None:
        return list(range(len(uuids)))
    entries = [entry.strip() for entry in variable.split(",")]
    by_uuid = entries[0].startswith("GPU-")
    places: list[int] = []
    for entry in entries:
        place = _by_uuid(entry, uuids) if by_uuid else _by_index(entry, len(uuids))
        if place is None:
            break
        if place in places:
            return []
        places.append(place)
    return places


def _by_index(entry: str, count: int) -> int | None:
    number = INTEGER.match(entry)
    place = int(number[0]) if number else -1
    return place if 0 <= place < count else None


def _by_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    if not entry.startswith("GPU-"):
        return None
    places = [place for place, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return places[0] if len(places) == 1 else None
