"""Finds out which plugins are installed, from package metadata alone. No plugin code runs here.

`scan()` reads every installed distribution once per process. Entry points of kinds that this core does not serve are kept
together with the reason, so that `pegboard plugins list` can show them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from pegboard.interfaces import HOOKS_GROUP, KINDS

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
    """Everything that was found, sorted by kind, name and distribution, never by install order. summaries: distribution → its
    description in one line."""

    entries: tuple[Entry, ...] = ()
    hooks: tuple[Entry, ...] = ()
    unusable: tuple[Unusable, ...] = ()
    duplicates: tuple[Duplicate, ...] = ()
    summaries: Mapping[str, str] = field(default_factory=dict)

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
    """Scan the folders and zip files of `path` (None = sys.path) now, without a cache."""
    used: dict[str, tuple[str, list[Entry]]] = {}
    summaries: dict[str, str] = {}
    duplicates = []
    for folder in sys.path if path is None else path:
        for metadata, points in _distributions(folder):
            name, version = normalized(metadata["Name"]), metadata["Version"]
            entries = sorted(_entries_of(name, version, points), key=lambda entry: entry.sort_key)
            if entries and name not in used:
                used[name], summaries[name] = (folder, entries), metadata.get("Summary", "")
            elif entries and used[name] != (folder, entries):
                first, first_entries = used[name]
                versions, is_same = (version, first_entries[0].version), entries == first_entries
                duplicates.append(Duplicate(name, *versions, folder or os.getcwd(), first or os.getcwd(), is_same))
    return _sorted_scan([entry for _, entries in used.values() for entry in entries], duplicates, summaries)


def _distributions(folder: str) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the metadata and the text of entry_points.txt of each distribution that has entry points of Pegboard.

    Folders are read here, because importing importlib.metadata takes longer than all the rest of `pegboard --help`.
    """
    readers: list[Callable[[str], str | None]] = []
    if os.path.isdir(folder or "."):
        found = sorted(name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info")))
        readers += [partial(_text, os.path.join(folder, name)) for name in found]
    elif os.path.isfile(folder):  # a zip file
        from importlib.metadata import Distribution

        readers += [distribution.read_text for distribution in Distribution.discover(path=[folder])]
    for read in readers:
        points = read("entry_points.txt") or ""
        if PREFIX in points:
            header = (read("METADATA") or read("PKG-INFO") or "").partition("\n\n")[0]
            metadata = dict(line.split(": ", 1) for line in header.splitlines() if ": " in line)
            if "Name" in metadata and "Version" in metadata:
                yield metadata, points


def _text(folder: str, name: str) -> str | None:
    """Return a file's text, or None if there is no such file."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _entries_of(distribution: str, version: str, points: str) -> Iterator[Entry]:
    """Yield the entries in the text of an entry_points.txt."""
    group = ""
    for line in map(str.strip, points.splitlines()):
        name, equals, value = (part.strip() for part in line.partition("="))
        if line.startswith("["):
            group = line.strip("[]")
        elif equals and group.startswith(PREFIX) and not line.startswith("#"):
            match = _GROUP.fullmatch(group)
            kind = match.group(1) if match else group.removeprefix(PREFIX)
            yield Entry(kind, name, distribution, version, value, group)


def _sorted_scan(found: list[Entry], duplicates: list[Duplicate], summaries: Mapping[str, str]) -> Scan:
    found = sorted(set(found), key=lambda entry: entry.sort_key)
    unusable = [Unusable(entry, reason) for entry in found if (reason := unserved_group(entry.group, entry.distribution))]
    refused = {item.entry for item in unusable}
    return Scan(
        entries=tuple(entry for entry in found if entry not in refused and entry.kind != HOOKS_KIND),
        hooks=tuple(entry for entry in found if entry not in refused and entry.kind == HOOKS_KIND),
        unusable=tuple(unusable),
        duplicates=tuple(sorted(duplicates, key=lambda item: (item.distribution, item.location))),
        summaries=summaries,
    )


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
