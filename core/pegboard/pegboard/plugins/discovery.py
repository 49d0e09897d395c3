"""Finds out which plugins are installed, from package metadata alone. No plugin code runs here.

`scan()` reads every installed distribution once per process. Entry points of kinds that this core does not serve are kept
together with the reason, so that `pegboard plugins list` can show them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pegboard.interfaces import HOOKS_GROUP, KINDS

if TYPE_CHECKING:
    from importlib_metadata import Distribution

PREFIX = "pegboard."
HOOKS_KIND = "hooks"
_GROUP = re.compile(r"pegboard\.([a-z0-9_]+)\.v(\d+)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry point as metadata. value: "module:OBJECT" of the spec. group: "pegboard.<kind>.v<major>"."""

    kind: str
    name: str
    distribution: str
    version: str
    value: str
    group: str

    @property
    def id(self) -> str:
        """The name that messages use: "kind:name (distribution version)"."""
        return f"{self.kind}:{self.name} ({self.distribution} {self.version})"

    @property
    def qualified(self) -> str:
        """The long name, "distribution:name", which is unique within a kind."""
        return f"{self.distribution}:{self.name}"

    @property
    def sort_key(self) -> tuple[str, str, str, str]:
        return (self.kind, self.name, self.distribution, self.group)


@dataclass(frozen=True, slots=True)
class Unusable:
    """An entry that this core cannot serve, because its kind is unknown or its interface has another major version."""

    entry: Entry
    reason: str


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A distribution that was found a second time, later on sys.path (a stale .egg-info, an editable install). The first one is
    used. same: both have the same version and entry points. If they do not, the user may expect the other one to run."""

    distribution: str
    version: str
    used_version: str
    location: str
    used_location: str
    same: bool


@dataclass(frozen=True, slots=True)
class Scan:
    """Everything that was found, sorted by kind, name and distribution, never by install order."""

    entries: tuple[Entry, ...] = ()
    hooks: tuple[Entry, ...] = ()
    unusable: tuple[Unusable, ...] = ()
    duplicates: tuple[Duplicate, ...] = ()

    def all_entries(self) -> Iterator[Entry]:
        """Return all entries: usable ones, hooks and unusable ones."""
        yield from (*self.entries, *self.hooks, *(unusable.entry for unusable in self.unusable))


def normalized(distribution: str) -> str:
    """Return the comparable form of a distribution's name (PEP 503), in which "Acme_Llama" and "acme-llama" are equal."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@cache
def scan() -> Scan:
    """Return the scan of this process. It is made on first use and then kept."""
    return scan_path(None)


def scan_path(path: Sequence[str] | None) -> Scan:
    """Scan the folders of `path` (None = sys.path) now, without a cache."""
    from importlib_metadata import Distribution

    return _collect(Distribution.discover() if path is None else Distribution.discover(path=list(path)))


def summary(distribution: str) -> str:
    """Return the line with which a distribution's metadata describes it."""
    from importlib_metadata import metadata

    return metadata(distribution).get("Summary") or ""


def _collect(distributions: Iterable[Distribution]) -> Scan:
    used: dict[str, tuple[Distribution, list[Entry]]] = {}
    duplicates = []
    for distribution in distributions:
        text = distribution.read_text("entry_points.txt")
        if not text or PREFIX not in text:  # reading names and versions of all others would take most of the time
            continue
        entries = sorted(_entries_of(distribution), key=lambda entry: entry.sort_key)
        if not entries:
            continue
        name = entries[0].distribution
        if name not in used:
            used[name] = (distribution, entries)
        elif _location(used[name][0]) != _location(distribution) or used[name][1] != entries:
            first, first_entries = used[name]
            versions, places = (entries[0].version, first_entries[0].version), (_location(distribution), _location(first))
            duplicates.append(Duplicate(name, *versions, *places, same=entries == first_entries))
    return _sorted_scan([entry for _, entries in used.values() for entry in entries], duplicates)


def _sorted_scan(found: list[Entry], duplicates: list[Duplicate]) -> Scan:
    found = sorted(set(found), key=lambda entry: entry.sort_key)
    unusable = [Unusable(entry, reason) for entry in found if (reason := unserved_group(entry.group, entry.distribution))]
    refused = {item.entry for item in unusable}
    return Scan(
        entries=tuple(entry for entry in found if entry not in refused and entry.kind != HOOKS_KIND),
        hooks=tuple(entry for entry in found if entry not in refused and entry.kind == HOOKS_KIND),
        unusable=tuple(unusable),
        duplicates=tuple(sorted(duplicates, key=lambda item: (item.distribution, item.location))),
    )


def _entries_of(distribution: Distribution) -> Iterator[Entry]:
    points = [point for point in distribution.entry_points if point.group.startswith(PREFIX)]
    metadata = distribution.metadata if points else {}  # every access parses the file, and so do `name` and `version`
    for point in points:
        name, version = normalized(metadata["Name"]), metadata["Version"]
        match = _GROUP.fullmatch(point.group)
        kind = match.group(1) if match else point.group.removeprefix(PREFIX)
        yield Entry(kind, point.name, name, version, point.value, point.group)


def unserved_group(group: str, distribution: str) -> str | None:
    """Return why this core does not serve an entry-point group, or None if it does."""
    if group == HOOKS_GROUP:
        return None
    match = _GROUP.fullmatch(group)
    if match is None:
        return f"group {group!r} is not of the form pegboard.<kind>.v<major>"
    kind, major = match.group(1), int(match.group(2))
    if kind != HOOKS_KIND and kind not in KINDS:
        return f"unknown kind {kind!r}: made for another version of pegboard, or misspelled"
    served = int(HOOKS_GROUP.rpartition("v")[2]) if kind == HOOKS_KIND else KINDS[kind].major
    if major == served:
        return None
    upgrade = "pegboard" if major > served else distribution
    return f"made for interface {kind} v{major}, this pegboard serves v{served}: upgrade {upgrade}"


def _location(distribution: Distribution) -> str:
    """Return the folder on sys.path in which the distribution was found."""
    return str(distribution.locate_file("")) or sys.prefix
