"""Kind `command`: one word of the command line, `pegboard WORD …`. Keyed by the word that is typed; runs in the caller's process.

`pegboard --help` lists commands by package metadata alone: the line of a command is its distribution's summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pegboard.interfaces.spec import Need, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec(Spec):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandNeed(Need):
    pass


@dataclass(frozen=True, slots=True)
class CommandSetup:
    """word: the one that was typed."""

    word: str


class Command(Protocol):
    def run(self, arguments: Sequence[str]) -> int:
        """Run with the words after the command's own; returns the exit status. A PegboardError becomes one line on stderr."""
