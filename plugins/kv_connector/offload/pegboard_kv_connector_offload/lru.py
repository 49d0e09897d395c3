"""What chooses the blocks that make room for others, and the choice by last use. It imports no
torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

Name = tuple[int, bytes]
"""(KV group, hash)."""


class Eviction(Protocol):
    """Knows the blocks that are stored, and in which order they were used."""

    def used(self, name: Name) -> None:
        """A stored block was used."""

    def make_room(self, name: Name, may_go: Callable[[Name], bool]) -> Name | None:
        """Choose a stored block that makes room for `name`, and forget that it is stored. Return
        None, and change nothing, if no block may go."""

    def added(self, name: Name) -> None:
        """A block was stored that was not stored before, after `make_room` if there was none."""


def oldest(names: OrderedDict[Name, None], may_go: Callable[[Name], bool]) -> Name | None:
    """Return the first block that may go, or None."""
    return next((name for name in names if may_go(name)), None)


class Lru:
    """The block whose last use is longest ago makes room."""

    def __init__(self) -> None:
        self._names: OrderedDict[Name, None] = OrderedDict()

    def used(self, name: Name) -> None:
        self._names.move_to_end(name)

    def make_room(self, name: Name, may_go: Callable[[Name], bool]) -> Name | None:
        victim = oldest(self._names, may_go)
        if victim is not None:
            del self._names[victim]
        return victim

    def added(self, name: Name) -> None:
        self._names[name] = None
