"""Which plugins are installed, and which of them this core can serve. No plugin code runs here.

Entry points of kinds that this core does not serve are kept together with the reason, so that
`pegboard plugins list` can show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from pegboard.installed import GROUP, SETTINGS_GROUP, Entry, Installed, installed, installed_on
from pegboard.interfaces import HOOKS_GROUP, KINDS

HOOKS_KIND = "hooks"
UNINSTALLED = "uninstalled"
"""The version of plugins that no distribution provides (`pegboard.plugins.uninstalled`)."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """An entry that this core cannot serve, because its kind is unknown or its interface has
    another major version."""

    entry: Entry
    reason: str


@dataclass(frozen=True, slots=True)
class Scan:
    """Everything that was found, sorted by kind, name and distribution, never by install order.
    summaries: distribution → its description in one line."""

    entries: tuple[Entry, ...] = ()
    hooks: tuple[Entry, ...] = ()
    unusable: tuple[Unusable, ...] = ()
    summaries: Mapping[str, str] = field(default_factory=dict)

    def all_entries(self) -> Iterator[Entry]:
        """Return all entries: usable ones, hooks and unusable ones."""
        yield from (*self.entries, *self.hooks, *(unusable.entry for unusable in self.unusable))


@cache
def scan() -> Scan:
    """Return the scan of this process. It is made on first use and then kept."""
    return _sorted_out(installed())


def scan_path(path: Sequence[str]) -> Scan:
    """Scan the folders and zip files of `path` now, without a cache."""
    return _sorted_out(installed_on(path))


def _sorted_out(installed: Installed) -> Scan:
    every = [entry for entry in installed.entries if entry.group != SETTINGS_GROUP]
    unusable = [
        Unusable(entry, reason)
        for entry in every
        if (reason := unserved_group(entry.group, entry.distribution))
    ]
    refused = {item.entry for item in unusable}
    served = _newest(entry for entry in every if entry not in refused)
    return Scan(
        entries=tuple(entry for entry in served if entry.kind != HOOKS_KIND),
        hooks=tuple(entry for entry in served if entry.kind == HOOKS_KIND),
        unusable=tuple(unusable),
        summaries=installed.summaries,
    )


def _newest(entries: Iterable[Entry]) -> list[Entry]:
    """Leave out entries that their distribution also has for a newer interface. So one wheel serves
    cores of both major versions."""
    newest: dict[tuple[str, str, str], Entry] = {}
    for entry in sorted(entries, key=lambda entry: entry.major):
        newest[entry.kind, entry.name, entry.distribution] = entry
    return sorted(newest.values(), key=lambda entry: entry.sort_key)


def outdated(entry: Entry) -> str:
    """Return what to do about a plugin that is served although its interface has a newer major
    version. Return "" for all others."""
    kind = KINDS.get(entry.kind)
    if kind is None or entry.major == kind.major:
        return ""
    return (
        f"made for {kind.name} v{entry.major}, which is served for now; pegboard has "
        f"v{kind.major}: upgrade {entry.distribution}"
    )


def unserved_group(group: str, distribution: str) -> str | None:
    """Return why this core does not serve an entry-point group, or None if it does."""
    if group in (HOOKS_GROUP, SETTINGS_GROUP):
        return None
    match = GROUP.fullmatch(group)
    if match is None:
        return f"group {group!r} is not of the form pegboard.<kind>.v<major>"
    kind = match.group(1)
    major = int(match.group(2))
    if kind != HOOKS_KIND and kind not in KINDS:
        return f"unknown kind {kind!r}: made for another version of pegboard, or misspelled"
    served = int(HOOKS_GROUP.rpartition("v")[2]) if kind == HOOKS_KIND else KINDS[kind].major
    if major == served or (major == served - 1 and kind in KINDS and KINDS[kind].earlier):
        return None
    upgrade = "pegboard" if major > served else distribution
    return f"made for interface {kind} v{major}, this pegboard serves v{served}: upgrade {upgrade}"
