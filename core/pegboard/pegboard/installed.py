"""What is installed, from package metadata alone. No plugin code runs here."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib_metadata import Distribution

PREFIX = "pegboard."
SETTINGS_GROUP = "pegboard.settings.v1"
"""Entry points of sections of settings (`config.sections`)."""
LABELLED = {"kv_connector"}
"""Kinds of which an engine may use one plugin several times. "NAME@LABEL" is a use of the plugin
NAME with options of its own."""
GROUP = re.compile(r"pegboard\.([a-z0-9_]+)\.v(\d+)")


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
    def major(self) -> int:
        """The major version of the interface that it was made for."""
        return int(self.group.rpartition("v")[2])

    @property
    def sort_key(self) -> tuple[str, str, str, str]:
        return (self.kind, self.name, self.distribution, self.group)


def without_label(kind: str, name: str) -> str:
    """Return the name of the plugin that `name`, perhaps with a label, uses."""
    return name.partition("@")[0] if kind in LABELLED else name


@dataclass(frozen=True, slots=True)
class Installed:
    """All entry points of Pegboard, sorted by kind, name and distribution, never by install order.
    summaries: distribution → its description in one line."""

    entries: tuple[Entry, ...]
    summaries: Mapping[str, str]


@cache
def installed() -> Installed:
    """Return what is installed. Every distribution is read on first use, once per process."""
    return installed_on(sys.path)


def installed_on(path: Sequence[str]) -> Installed:
    """Read the folders and zip files of `path` now, without a cache. If two distributions have the
    same name, the first one counts."""
    by_distribution: dict[str, list[Entry]] = {}
    summaries: dict[str, str] = {}
    for folder in path:
        for distribution, metadata in distributions(folder):
            name = normalized(metadata["Name"])
            entries = list(_entries_of(distribution, name, metadata["Version"]))
            if entries and name not in by_distribution:
                by_distribution[name] = entries
                summaries[name] = metadata.get("Summary") or ""
    every = {entry for entries in by_distribution.values() for entry in entries}
    return Installed(tuple(sorted(every, key=lambda entry: entry.sort_key)), summaries)


def normalized(distribution: str) -> str:
    """Return the comparable form of a distribution's name (PEP 503), in which "Acme_Llama" and
    "acme-llama" are equal."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


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
            match = GROUP.fullmatch(point.group)
            kind = match.group(1) if match else point.group.removeprefix(PREFIX)
            yield Entry(kind, point.name, name, version, point.value, point.group)
