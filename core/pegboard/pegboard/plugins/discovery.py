"""Finds out which plugins are installed, from package metadata alone. No plugin code runs here.

`scan()` reads every installed distribution once per process. Entry points of kinds that this core
does not serve are kept together with the reason, so that `pegboard plugins list` can show them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, cast

from pegboard.interfaces import HOOKS_GROUP, KINDS

if TYPE_CHECKING:
    from importlib_metadata import Distribution

PREFIX = "pegboard."
HOOKS_KIND = "hooks"
UNINSTALLED = "uninstalled"
"""The version of plugins that no distribution provides (`pegboard.plugins.uninstalled`)."""
_GROUP = re.compile(r"pegboard\.([a-z0-9_]+)\.v(\d+)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry point as metadata. value: "module:OBJECT" of the spec; of an uninstalled plugin,
    "module:Class" or "/path/FILE.py:Class" of its implementation. group:
    "pegboard.<kind>.v<major>"."""

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


def normalized(distribution: str) -> str:
    """Return the comparable form of a distribution's name (PEP 503), in which "Acme_Llama" and
    "acme-llama" are equal."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@cache
def scan() -> Scan:
    """Return the scan of this process. It is made on first use and then kept."""
    return scan_path(None)


def scan_path(path: Sequence[str] | None) -> Scan:
    """Scan the folders and zip files of `path` (None = sys.path) now, without a cache. If two
    distributions have the same name, the first one counts."""
    found: dict[str, list[Entry]] = {}
    summaries: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for distribution, metadata in distributions(folder):
            name = normalized(metadata["Name"])
            entries = list(_entries_of(distribution, name, metadata["Version"]))
            if entries and name not in found:
                found[name] = entries
                summaries[name] = metadata.get("Summary") or ""
    every = sorted(
        {entry for entries in found.values() for entry in entries}, key=lambda entry: entry.sort_key
    )
    unusable = [
        Unusable(entry, reason)
        for entry in every
        if (reason := unserved_group(entry.group, entry.distribution))
    ]
    refused = {item.entry for item in unusable}
    return Scan(
        entries=tuple(
            entry for entry in every if entry not in refused and entry.kind != HOOKS_KIND
        ),
        hooks=tuple(entry for entry in every if entry not in refused and entry.kind == HOOKS_KIND),
        unusable=tuple(unusable),
        summaries=summaries,
    )


def distributions(folder: str) -> Iterator[tuple[Distribution, Mapping[str, str]]]:
    """Yield each distribution in a folder or zip file that has entry points of Pegboard, and its
    metadata. Those whose metadata cannot be read, or has no name or version, are left out."""
    from importlib_metadata import Distribution, MetadataNotFound

    for distribution in Distribution.discover(path=[folder]):
        # reading all others would take most of the time
        if PREFIX in (distribution.read_text("entry_points.txt") or ""):
            with suppress(MetadataNotFound, UnicodeError):
                metadata = cast("Mapping[str, str]", distribution.metadata)
                if metadata.get("Name") and metadata.get("Version"):
                    yield distribution, metadata


def _entries_of(distribution: Distribution, name: str, version: str) -> Iterator[Entry]:
    for point in distribution.entry_points:
        if point.group.startswith(PREFIX):
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
    kind = match.group(1)
    major = int(match.group(2))
    if kind != HOOKS_KIND and kind not in KINDS:
        return f"unknown kind {kind!r}: made for another version of pegboard, or misspelled"
    served = int(HOOKS_GROUP.rpartition("v")[2]) if kind == HOOKS_KIND else KINDS[kind].major
    if major == served:
        return None
    upgrade = "pegboard" if major > served else distribution
    return f"made for interface {kind} v{major}, this pegboard serves v{served}: upgrade {upgrade}"
