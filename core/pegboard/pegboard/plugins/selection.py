"""How one candidate wins, as values: the gates, the total order and the explanation. Imports no plugin.

Gates in order: discovered → allowed → compatible → available (probe) → suitable (need) → ranked → selected. A candidate
carries the gate where it stopped, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from pegboard.errors import PluginUnsuitable
from pegboard.interfaces.spec import TIERS, Need, Spec
from pegboard.plugins.discovery import Entry
from pegboard.plugins.probing import probe_facts

__all__ = ["GATES", "Candidate", "Decision", "Gate", "need_text", "pick", "probe_facts", "rank_key"]

Gate = Literal["discovered", "allowed", "compatible", "available", "suitable", "ranked", "selected"]
GATES: tuple[Gate, ...] = ("discovered", "allowed", "compatible", "available", "suitable", "ranked", "selected")

_STATES: dict[Gate, str] = {
    "discovered": "not served",
    "allowed": "blocked",
    "compatible": "incompatible",
    "available": "unavailable",
    "suitable": "unsuitable",
    "ranked": "outranked",
    "selected": "selected",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """gate: where it stopped ("ranked": it would do, another is better). broken: it should work here but does not."""

    entry: Entry
    gate: Gate
    reason: str = ""
    broken: bool = False

    @property
    def state(self) -> str:
        """One word for a person."""
        return "broken" if self.broken else _STATES[self.gate]


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one choice. key: what it was for within the kind (architecture, op, layer group), "" if there is one
    only. need: text form of the need. rank: why the winner won. candidates: winner first, then in rank order."""

    kind: str
    winner: Entry | None
    candidates: tuple[Candidate, ...] = ()
    key: str = ""
    need: str = ""
    rank: str = ""

    def line(self) -> str:
        """One line for the log."""
        title = f"{self.kind} {self.key}".rstrip()
        if self.winner is None:
            return f"{title} → nothing suits; " + "; ".join(f"{c.entry.name} {c.state}: {c.reason}" for c in self.candidates)
        others = [c for c in self.candidates if c.gate != "selected"]
        more = f"; not {', '.join(f'{c.entry.name} ({c.state})' for c in others)}" if others else ""
        return f"{title} → {self.winner.name}  {self.winner.distribution} {self.winner.version}  ({self.rank}{more})"

    def table(self) -> str:
        """The whole explanation, one candidate a line."""
        title = f"{self.kind} {self.key}".rstrip()
        if self.winner is None:
            lines = [f"{title} → none   ({self.rank})" if self.rank else f"{title} → nothing suits"]
        else:
            rank = f"   ({self.rank})" if self.rank else ""
            lines = [f"{title} → {self.winner.name}   {self.winner.distribution} {self.winner.version}{rank}"]
        if self.need:
            lines.append(f"  need: {self.need}")
        others = [c for c in self.candidates if c.gate != "selected"]
        names = display_names([c.entry for c in self.candidates])
        width = max((len(names[c.entry]) for c in others), default=0)
        lines += [f"  {names[c.entry]:<{width}}  {c.state:<12}  {c.reason}".rstrip() for c in others]
        return "\n".join(lines)

    def describe(self) -> dict[str, Any]:
        """The explanation as plain data."""
        return {
            "kind": self.kind,
            "key": self.key,
            "need": self.need,
            "winner": self.winner.qualified if self.winner else None,
            "rank": self.rank,
            "candidates": [
                {"name": candidate.entry.qualified, "state": candidate.state, "gate": candidate.gate, "reason": candidate.reason}
                for candidate in self.candidates
            ],
        }

    def require(self) -> Entry:
        """The winner. Raises PluginUnsuitable with the table when there is none."""
        if self.winner is None:
            raise PluginUnsuitable(f"no plugin of kind {self.kind!r} can do what is needed here\n{self.table()}")
        return self.winner


def display_names(entries: Sequence[Entry]) -> dict[Entry, str]:
    """Short names where they are unique among `entries`, else the long ones."""
    names = [entry.name for entry in entries]
    return {entry: entry.name if names.count(entry.name) == 1 else entry.qualified for entry in entries}


def need_text(need: Need) -> str:
    """A need as text that is the same in every process (sets are sorted)."""
    parts = []
    for item in fields(need):
        value = getattr(need, item.name)
        if value is None or value is False:
            continue
        shown = "{" + ", ".join(sorted(map(repr, value))) + "}" if isinstance(value, set | frozenset) else repr(value)
        parts.append(f"{item.name}={shown}")
    return ", ".join(parts)


RankKey = tuple[int, int, int, str, str]


def rank_key(entry: Entry, spec: Spec, order: Sequence[Entry], prefers: Sequence[Entry]) -> RankKey:
    """Lower is better: the user's order, the model's or platform's preference, tier, name, distribution. Total, because
    (name, distribution) is unique within a kind."""
    first = order.index(entry) if entry in order else len(order)
    second = prefers.index(entry) if entry in prefers else len(prefers)
    return (first, second, TIERS.index(spec.tier), entry.name, entry.distribution)


_RANK_WORDS = ("the user's order", "preference", "tier", "name", "distribution")


def pick(suited: Sequence[tuple[Entry, Spec]], order: Sequence[Entry], prefers: Sequence[Entry]) -> tuple[list[Candidate], str]:
    """Rank those that suit: candidates best first (the first is selected), and why the first one won."""
    if len(suited) < 2:
        return [Candidate(entry, "selected") for entry, _ in suited], "the only one that suits" if suited else ""
    keyed = sorted(((rank_key(entry, spec, order, prefers), entry, spec) for entry, spec in suited), key=lambda row: row[0])
    best_key, best, best_spec = keyed[0]
    candidates = [Candidate(best, "selected")]
    for key, entry, spec in keyed[1:]:
        candidates.append(Candidate(entry, "ranked", _behind(best_key, key, best, best_spec, spec)))
    word = _RANK_WORDS[_differs(best_key, keyed[1][0])]
    rank = f"rank: tier {best_spec.tier}" if word == "tier" else f"rank: {word}"
    return candidates, rank


def _differs(best: RankKey, other: RankKey) -> int:
    return next(index for index in range(len(best)) if best[index] != other[index])


def _behind(best_key: RankKey, key: RankKey, best: Entry, best_spec: Spec, spec: Spec) -> str:
    index = _differs(best_key, key)
    if index == 2:
        return f"tier {spec.tier} < {best_spec.tier}"
    if index < 2:
        return f"{_RANK_WORDS[index]} puts {best.name} first"
    return f"equal to {best.name}, which comes first by {_RANK_WORDS[index]}"


def by_gate(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that got furthest first, then by name."""
    return sorted(candidates, key=lambda c: (-GATES.index(c.gate), c.entry.name, c.entry.distribution))
