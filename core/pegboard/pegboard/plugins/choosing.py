"""Chooses plugins by need: runs the gates over the candidates of a kind, and remembers why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from pegboard.errors import PluginBroken, PluginError, PluginNotFound, PluginUnsuitable
from pegboard.installed import Entry
from pegboard.interfaces.spec import BATCH_INVARIANT, TIERS, Absent, Broken, Need, Spec, unmet
from pegboard.log import get_logger
from pegboard.plugins.catalogue import Catalogue
from pegboard.plugins.defaults import default_platforms
from pegboard.plugins.importing import import_part, incompatibility
from pegboard.plugins.names import check_kind, not_found, to_install
from pegboard.plugins.selection import Candidate, Decision, by_gate, need_text, pick

logger = get_logger(__name__)

PLATFORM = "platform"
WILDCARD = "*"


class Chooser:
    """decisions: (kind, key) → the choice of this process. locked: the same of its parent."""

    def __init__(self, catalogue: Catalogue, locked: Iterable[Decision] = ()) -> None:
        self._catalogue = catalogue
        self.decisions: dict[tuple[str, str], Decision] = {}
        self._locked = {(decision.kind, decision.key): decision for decision in locked}

    def choose(
        self,
        kind: str,
        need: Need,
        *,
        explicit: str | None = None,
        keys: Sequence[str] | None = None,
        prefers: Sequence[str] = (),
        key: str = "",
        among: Iterable[Entry] | None = None,
        required: bool = True,
    ) -> Decision:
        """Choose the best plugin of `kind` for `need`, and record the decision under (kind, key).

        explicit: the user's choice (None or "auto" = none). It is used, or an error is raised; no
        other plugin replaces it. keys: for a keyed kind, the names to look for, in this order,
        followed by "*". If one of these plugins is broken, an error is raised instead of taking the
        next. key: the first of `keys` if not given. prefers: names that the model or the platform
        prefers; unknown names are ignored. among: only these entries are considered. required: if
        False and nothing is suitable, a Decision without a winner is returned instead of an error.

        Raises PluginNotFound, PluginUnsuitable (with the table), PluginBroken or PluginConflict.
        """
        key = key or (keys[0] if keys else "")
        if explicit not in (None, "auto"):
            decision = self.record(self._choose_explicit(kind, need, str(explicit), key))
        else:
            decision = self._choose_ranked(
                kind,
                need,
                key=key,
                keys=keys,
                prefers=prefers,
                among=among,
                required=required,
            )
        logger.debug("%s", decision.line())
        return decision

    def record(self, decision: Decision) -> Decision:
        """Keep a decision for explanations and for the lock. Returns the decision."""
        self.decisions[decision.kind, decision.key] = decision
        return decision

    def _choose_ranked(
        self,
        kind: str,
        need: Need,
        *,
        key: str,
        keys: Sequence[str] | None,
        prefers: Sequence[str],
        among: Iterable[Entry] | None,
        required: bool,
    ) -> Decision:
        """Choose as `choose` does without an explicit name."""
        check_kind(kind)
        wanted = None if among is None else set(among)
        locked = self._from_lock(kind, need, key)
        if locked is not None and (wanted is None or locked.winner in wanted):
            return locked
        preferred = []
        for name in prefers:
            # a preferred plugin that is not installed or not allowed is ignored
            with suppress(PluginError):
                preferred.append(self._catalogue.find(kind, name))
        entries = [
            entry
            for entry in self._catalogue.scan.entries
            if entry.kind == kind and (wanted is None or entry in wanted)
        ]
        names = [""] if keys is None else list(dict.fromkeys([*keys, WILDCARD]))
        judged = []
        if among is None:
            unusable = [item for item in self._catalogue.scan.unusable if item.entry.kind == kind]
            judged = [
                Candidate(u.entry, "discovered", u.reason)
                for u in unusable
                if keys is None or u.entry.name in names
            ]
        ranked: list[Candidate] = []
        rank = ""
        for name in names:
            named = [entry for entry in entries if keys is None or entry.name == name]
            if ranked:
                reason = f"{ranked[0].entry.name} comes before {name!r}"
                judged += [
                    Candidate(entry, "ranked", reason)
                    for entry in named
                    if not self._catalogue.blocked(entry)
                ]
                continue
            candidates = [self._judge(entry, need) for entry in named]
            judged += candidates
            suited = [
                (c.entry, self._catalogue.spec(c.entry)) for c in candidates if c.gate == "ranked"
            ]
            if keys is not None and name != WILDCARD:
                self._refuse_unclear(
                    Decision(kind, None, tuple(by_gate(judged)), key, need_text(need)),
                    candidates,
                    suited,
                )
            ranked, rank = pick(
                suited, _platforms_in_order(suited) if kind == PLATFORM else preferred
            )
            if keys is not None and ranked:
                rank = "any name" if name == WILDCARD else "exact name"
        winner = ranked[0].entry if ranked else None
        shown = {c.entry for c in ranked}
        stopped = by_gate([c for c in judged if c.entry not in shown])
        decision = self.record(
            Decision(kind, winner, (*ranked, *stopped), key, need_text(need), rank)
        )
        if kind == PLATFORM:
            _refuse_broken_platform(decision)
        for candidate in judged:
            if candidate.broken:
                self._catalogue.quarantine(candidate.entry, candidate.reason)
        if required and decision.winner is None:
            if not decision.candidates:
                raise (
                    PluginNotFound(to_install(kind))
                    if keys is None
                    else not_found(kind, key, self._catalogue.names(kind), typed=False)
                )
            decision.require()
        return decision

    def _refuse_unclear(
        self,
        decision: Decision,
        candidates: Sequence[Candidate],
        suited: Sequence[tuple[Entry, Spec]],
    ) -> None:
        """Raise an error if the plugin for this name is broken, or if two provide it. The
        checkpoint asks for exactly this name, so the next name must not be taken."""
        broken = [c for c in candidates if c.broken]
        if broken and not suited:
            self.record(decision)
            raise PluginBroken(_attributed(broken[0]), plugin=broken[0].entry.id)
        if len(suited) > 1:
            raise self._catalogue.conflict(
                decision.kind, suited[0][0].name, [entry for entry, _ in suited]
            )

    def _choose_explicit(self, kind: str, need: Need, name: str, key: str) -> Decision:
        """Choose the entry that the user named. If it cannot be used, the error says why, and what
        can be used instead."""
        entry = self._catalogue.find(kind, name)
        candidate = self._judge(entry, need)
        if candidate.gate == "ranked":
            others = [
                Candidate(other, "ranked", f"{entry.name} was asked for")
                for other in self._catalogue.entries(kind)
                if other != entry
            ]
            shown = (replace(candidate, gate="selected"), *by_gate(others))
            return Decision(kind, entry, shown, key, need_text(need), "asked for")
        self.record(Decision(kind, None, (candidate,), key, need_text(need)))
        alternative = self._alternative(kind, need, entry)
        advice = (
            f"; what would work here: {alternative.name} ({alternative.distribution})"
            if alternative
            else ""
        )
        if candidate.broken:
            raise PluginBroken(_attributed(candidate) + advice, plugin=entry.id)
        advice = advice or f"; no other installed {kind} plugin would work here"
        raise PluginUnsuitable(
            f"{kind} {name!r} was asked for but is {candidate.state}: {candidate.reason}{advice}",
            plugin=entry.id,
        )

    def _judge(self, entry: Entry, need: Need) -> Candidate:
        """Check the gates for one entry, up to "suitable". "ranked" means that it passed all of
        them. An error of the plugin becomes the reason of its candidate. Raises PluginBroken if a
        child process has another version than its parent."""
        if reason := self._catalogue.blocked(entry):
            return Candidate(entry, "allowed", reason)
        if replacement := self._catalogue.replacements(entry.kind).get(entry.qualified):
            return Candidate(
                entry, "allowed", f"replaced by {replacement.qualified} in plugins.override"
            )
        self._catalogue.verify_version(entry)
        try:
            spec = self._catalogue.spec(entry)
        except PluginError as error:
            return Candidate(entry, "compatible", str(error), broken=True)
        if reason := incompatibility(entry, spec):
            return Candidate(entry, "compatible", reason)
        if need.platform is not None and not self._catalogue.runs_on(spec, need.platform):
            assert spec.platforms is not None
            return Candidate(
                entry,
                "available",
                f"runs on {', '.join(sorted(spec.platforms))}, not on {need.platform}",
            )
        try:
            verdict = self._catalogue.verdict(entry)
        except PluginError as error:
            return Candidate(entry, "available", str(error), broken=True)
        if isinstance(verdict, Absent):
            return Candidate(entry, "available", verdict.reason)
        if isinstance(verdict, Broken):
            return Candidate(entry, "available", verdict.reason, broken=True)
        return _suitable(entry, spec, need)

    def _from_lock(self, kind: str, need: Need, key: str) -> Decision | None:
        """Return the parent's choice, if it made one for the same key and need."""
        locked = self._locked.get((kind, key))
        if locked is None or locked.winner is None or locked.need != need_text(need):
            return None
        self._catalogue.verify_version(locked.winner)
        return self.record(
            replace(
                locked,
                candidates=(Candidate(locked.winner, "selected"),),
                rank=f"{locked.rank}; locked",
            )
        )

    def _alternative(self, kind: str, need: Need, refused: Entry) -> Entry | None:
        judged = [
            self._judge(entry, need) for entry in self._catalogue.entries(kind) if entry != refused
        ]
        ranked, _ = pick(
            [(c.entry, self._catalogue.spec(c.entry)) for c in judged if c.gate == "ranked"]
        )
        return ranked[0].entry if ranked else None


def _platforms_in_order(suited: Sequence[tuple[Entry, Spec]]) -> list[Entry]:
    """Sort platforms: those with a device of their own before the host's processor, and then the
    known ones first. What runs must not change because a package was installed whose name comes
    earlier in the alphabet."""
    known = default_platforms()

    def place(row: tuple[Entry, Spec]) -> tuple[bool, int, int, tuple[str, ...]]:
        entry, spec = row
        rank = known.index(entry.name) if entry.name in known else len(known)
        return "device" not in spec.flags, rank, TIERS.index(spec.tier), entry.sort_key

    return [entry for entry, _ in sorted(suited, key=place)]


def _suitable(entry: Entry, spec: Spec, need: Need) -> Candidate:
    reasons = unmet(spec.supports, need.wants())
    if need.batch_invariant and BATCH_INVARIANT not in spec.flags:
        reasons.append("its results depend on the batch: it lacks the flag batch_invariant")
    if not reasons and spec.suits:
        try:
            reasons = list(import_part(entry, spec.suits, "suits")(need))
        except PluginError as error:
            return Candidate(entry, "suitable", str(error), broken=True)
        except Exception as error:  # noqa: BLE001
            # the plugin's code: any exception means that it is not suitable
            return Candidate(
                entry,
                "suitable",
                f"{spec.suits} raised {type(error).__name__}: {error}",
                broken=True,
            )
    return (
        Candidate(entry, "suitable", "; ".join(reasons)) if reasons else Candidate(entry, "ranked")
    )


def _refuse_broken_platform(decision: Decision) -> None:
    """Raise an error if a platform is broken: a device that exists but cannot be used must not lead
    to a silent run on another one."""
    for candidate in decision.candidates:
        if candidate.broken:
            others = (
                f", or name another with --device ({decision.winner.name} would work)"
                if decision.winner
                else ""
            )
            deny = f"deny {candidate.entry.distribution} (plugins.deny)"
            raise PluginBroken(
                f"{_attributed(candidate)}; repair it, {deny}{others}", plugin=candidate.entry.id
            )


def _attributed(candidate: Candidate) -> str:
    prefix = candidate.entry.id
    return (
        candidate.reason
        if candidate.reason.startswith(prefix)
        else f"{prefix} is broken: {candidate.reason}"
    )
