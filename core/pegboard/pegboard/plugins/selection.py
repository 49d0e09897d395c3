"""The values of a choice: the gates, the ranking and the explanation. This module imports no
plugin.

The gates in order are: discovered → allowed → compatible → available (probe) → suitable (need) →
ranked → selected. A candidate has the gate where it stopped, and the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from pegboard.errors import PluginUnsuitable
from pegboard.installed import Entry
from pegboard.interfaces.spec import TIERS, Need, Spec

Gate = Literal["discovered", "allowed", "compatible", "available", "suitable", "ranked", "selected"]
GATES: tuple[Gate, ...] = (
    "discovered",
    "allowed",
    "compatible",
    "available",
    "suitable",
    "ranked",
    "selected",
)

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
    """An entry that a choice considered. gate: where it stopped; "ranked" means that it is
    suitable, but another one is better. broken: it should work on this machine, but does not."""

    entry: Entry
    gate: Gate
    reason: str = ""
    broken: bool = False

    @property
    def state(self) -> str:
        """The state in one word, for people."""
        return "broken" if self.broken else _STATES[self.gate]


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one choice. key: what it was for within the kind (architecture, op, layer
    group); "" if the kind has only one choice. need: the need as text. rank: why the winner won.
    notes: what is known about how the winner is used. candidates: the winner first, then the others
    in rank order."""

    kind: str
    winner: Entry | None
    candidates: tuple[Candidate, ...] = ()
    key: str = ""
    need: str = ""
    rank: str = ""
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """Return one line for the log."""
        title = f"{self.kind} {self.key}".rstrip()
        if self.winner is None:
            return f"{title} → nothing suits; " + "; ".join(
                f"{c.entry.name} {c.state}: {c.reason}" for c in self.candidates
            )
        others = [c for c in self.candidates if c.gate != "selected"]
        more = f"; not {', '.join(f'{c.entry.name} ({c.state})' for c in others)}" if others else ""
        return (
            f"{title} → {self.winner.name}  {self.winner.distribution} {self.winner.version}  "
            f"({self.rank}{more})"
        )

    def table(self) -> str:
        """Return the whole explanation, with one candidate per line."""
        title = f"{self.kind} {self.key}".rstrip()
        if self.winner is None:
            lines = [f"{title} → none   ({self.rank})" if self.rank else f"{title} → nothing suits"]
        else:
            rank = f"   ({self.rank})" if self.rank else ""
            lines = [
                (
                    f"{title} → {self.winner.name}   {self.winner.distribution} "
                    f"{self.winner.version}{rank}"
                )
            ]
        if self.need:
            lines.append(f"  need: {self.need}")
        short = [c.entry.name for c in self.candidates]
        others = [c for c in self.candidates if c.gate != "selected"]
        names = [
            c.entry.name if short.count(c.entry.name) == 1 else c.entry.qualified for c in others
        ]
        width = max(map(len, names), default=0)
        lines += [f"  {note}" for note in self.notes]
        lines += [
            f"  {name:<{width}}  {c.state:<12}  {c.reason}".rstrip()
            for name, c in zip(names, others, strict=True)
        ]
        return "\n".join(lines)

    def describe(self) -> dict[str, Any]:
        """Return the explanation as plain data, as `plugins why --json` and the HTTP API show
        it."""

        def shown(entry: Entry) -> dict[str, str]:
            return {
                "name": entry.name,
                "distribution": entry.distribution,
                "version": entry.version,
            }

        return {
            "kind": self.kind,
            "key": self.key,
            "need": self.need,
            "winner": shown(self.winner) if self.winner else None,
            "rank": self.rank,
            "notes": list(self.notes),
            "candidates": [
                {**shown(c.entry), "gate": c.gate, "state": c.state, "reason": c.reason}
                for c in self.candidates
            ],
        }

    def require(self) -> Entry:
        """Return the winner. Raises PluginUnsuitable with the table if there is none."""
        if self.winner is None:
            raise PluginUnsuitable(
                f"no plugin of kind {self.kind!r} can do what is needed\n{self.table()}"
            )
        return self.winner


def need_text(need: Need) -> str:
    """Return a need as text, which is the same in every process because sets are sorted."""

    def shown(value: object) -> str:
        return (
            "{" + ", ".join(sorted(map(repr, value))) + "}"
            if isinstance(value, set | frozenset)
            else repr(value)
        )

    values = {item.name: getattr(need, item.name) for item in fields(need)}
    return ", ".join(
        f"{name}={shown(value)}"
        for name, value in values.items()
        if value is not None and value is not False
    )


RANK_WORDS = ("preference", "tier", "name", "distribution")


def pick(
    suited: Sequence[tuple[Entry, Spec]], prefers: Sequence[Entry] = ()
) -> tuple[list[Candidate], str]:
    """Rank the suitable entries. Returns the candidates, best first, and why the first one won. The
    first one is selected.

    They are ordered by the model's or platform's preference, then by tier, name and distribution.
    The order is total, because (name, distribution) is unique within a kind.
    """
    if len(suited) < 2:
        return [
            Candidate(entry, "selected") for entry, _ in suited
        ], "the only one that suits" if suited else ""

    def place(row: tuple[Entry, Spec]) -> tuple[int, int, str, str]:
        entry, spec = row
        preference = prefers.index(entry) if entry in prefers else len(prefers)
        return preference, TIERS.index(spec.tier), entry.name, entry.distribution

    def decided_by(row: tuple[Entry, Spec]) -> str:
        return next(
            word
            for word, mine, other in zip(RANK_WORDS, place(best), place(row), strict=True)
            if mine != other
        )

    best, *others = sorted(suited, key=place)
    name = best[0].name
    tier = best[1].tier
    candidates = [Candidate(best[0], "selected")]
    for row in others:
        word = decided_by(row)
        reason = {
            "preference": f"preference puts {name} first",
            "tier": f"tier {row[1].tier} < {tier}",
        }.get(word)
        candidates.append(
            Candidate(row[0], "ranked", reason or f"equal to {name}, which comes first by {word}")
        )
    word = decided_by(others[0])
    return candidates, f"rank: tier {tier}" if word == "tier" else f"rank: {word}"


def by_gate(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates by how far they got, then by name."""
    return sorted(
        candidates, key=lambda c: (-GATES.index(c.gate), c.entry.name, c.entry.distribution)
    )
