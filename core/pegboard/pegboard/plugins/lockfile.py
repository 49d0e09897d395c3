"""The file that pins a set of plugins: `pegboard plugins lock` writes it, and `--plugins-lock FILE`
refuses to start with another set.

It names every distribution whose plugins may be used, and every kit of Pegboard that they need,
with its version and a digest of its code, and the versions of all else that these need. The digest
is of the files that would be imported, so it notices a change of an installed file. It is the same
for a wheel and for an editable installation of the same code. The bytecode that Python keeps must
be that of its source. `sitecustomize` and `usercustomize` are pinned as if they were distributions.

The lock notices changes since it was written. It does not stop an attacker who can write to the
folders of the interpreter, or to packages that are pinned by version only.
"""

from __future__ import annotations

import hashlib
import marshal
import struct
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import MAGIC_NUMBER, cache_from_source, find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pegboard.data.checkpoint_file import read_text
from pegboard.errors import ConfigError, ModelError
from pegboard.installed import Entry, normalized
from pegboard.plugins.discovery import UNINSTALLED
from pegboard.plugins.registry import Registry
from pegboard.plugins.selection import Decision

CORE = "pegboard"
STARTUP = {
    "sitecustomize": "(run by Python at its start)",
    "usercustomize": "(run by Python at its start)",
}
"""Modules that Python runs at its start → the text that the lock stores as their version."""


class LockedPlugins(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One distribution. digest: sha256 of its packages. plugins: "kind:name" of each of its
    plugins, sorted."""

    version: str
    digest: str
    plugins: list[str]


class LockFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """distributions: those with plugins, core and its kits. requirements: name → version of
    everything else that they need. folders: name → the folder from which one of the distributions
    was installed. model: the model for which the choices were made. decisions: these choices,
    sorted by kind and key."""

    format: Literal[1]
    distributions: dict[str, LockedPlugins]
    requirements: dict[str, str] = {}
    folders: dict[str, str] = {}
    model: str | None = None
    decisions: list[Decision] = []


def read(path: Path) -> LockFile:
    """Read a lock file. Raises ConfigError."""
    try:
        return msgspec.json.decode(read_text(path), type=LockFile)
    except (ModelError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a lock file of plugins: {error}; see pegboard plugins lock"
        ) from error


def installed(registry: Registry, more: Iterable[str] = ()) -> dict[str, LockedPlugins]:
    """Return what a lock file says about the distributions whose plugins the rules allow, about
    pegboard, and about those of `more` that are installed. Raises ConfigError for code that cannot
    be locked."""
    by_distribution: dict[str, list[Entry]] = {CORE: []}
    by_distribution |= {name: [] for name in more if installed_version(name)} | {
        name: [] for name in STARTUP if find_spec(name)
    }
    for entry in (*registry.scan.entries, *registry.scan.hooks):
        if not registry.blocked(entry):
            by_distribution.setdefault(entry.distribution, []).append(entry)
    owners = _owners()
    return {
        name: _locked(name, entries, owners) for name, entries in sorted(by_distribution.items())
    }


def _locked(name: str, entries: Iterable[Entry], owners: Mapping[str, set[str]]) -> LockedPlugins:
    versions = {entry.version for entry in entries} or {
        STARTUP.get(name) or installed_version(name) or "unknown"
    }
    roots = {entry.value.partition(":")[0].partition(".")[0] for entry in entries} | {
        name.replace("-", "_")
    }
    roots |= {root for root, names in owners.items() if name in names}
    for root in sorted(roots):
        if others := owners.get(root, set()) - {name}:
            message = (
                f"{min(others)} has installed files in the package {root} of {name}, so it cannot "
                "be locked"
            )
            raise ConfigError(f"{message}: uninstall one of them")
    plugins = sorted(f"{entry.kind}:{entry.name}" for entry in entries)
    return LockedPlugins(", ".join(sorted(versions)), _digest(sorted(roots)), plugins)


def _owners() -> dict[str, set[str]]:
    """Return top-level package or module → the distributions that have installed files in it.
    Editable ones are missing."""
    owners: dict[str, set[str]] = {}
    for each in distributions():
        name = normalized(each.name or "")
        for line in (each.read_text("RECORD") or "").splitlines():
            path = line.partition(",")[0]
            if path.endswith(".py") and path[0] != ".":
                owners.setdefault(path.partition("/")[0].removesuffix(".py"), set()).add(name)
    return owners


def _digest(packages: Iterable[str]) -> str:
    """Return the sha256 of the files of these top-level packages, without the bytecode that Python
    keeps, which is compared with its source. Raises ConfigError if it differs, or if a file is a
    link."""
    whole = hashlib.sha256()
    for package in packages:
        for name, path in sorted(_files(package)):
            _check_bytecode(path)
            whole.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def _files(package: str) -> Iterator[tuple[str, Path]]:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in folder.rglob("*"):
            if path.is_symlink():
                raise ConfigError(
                    f"{path} is a link, which cannot be locked: install the files themselves"
                )
            if path.is_file() and (path.parent.name, path.suffix) != ("__pycache__", ".pyc"):
                yield f"{package}/{path.relative_to(folder).as_posix()}", path
    if (
        spec.submodule_search_locations is None
        and spec.origin is not None
        and Path(spec.origin).is_file()
    ):
        yield package, Path(spec.origin)


def _check_bytecode(source: Path) -> None:
    """Raise ConfigError if Python would run other bytecode than that of the source."""
    cached = Path(cache_from_source(str(source)))
    if source.suffix != ".py" or not cached.is_file():
        return
    raw = cached.read_bytes()
    status = source.stat()
    current = struct.pack("<III", 0, int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    if raw[:4] != MAGIC_NUMBER or (raw[4:8] == current[:4] and raw[4:16] != current):
        return  # Python compiles the source again
    try:
        is_own = marshal.loads(raw[16:]) == compile(
            source.read_bytes(), str(source), "exec", dont_inherit=True
        )
    except (SyntaxError, ValueError, EOFError, TypeError):
        is_own = False
    if not is_own:
        raise ConfigError(
            f"{cached} is not the bytecode of {source}, but Python would run it: delete it"
        )


class Difference(NamedTuple):
    """wanted: the locked version, or None if the distribution is not locked. installed: the version
    here, or None if it is not installed or not allowed. If both are equal, the files differ."""

    name: str
    wanted: str | None
    installed: str | None

    def __str__(self) -> str:
        if self.installed == UNINSTALLED:
            return f"{self.name} is not installed, so it cannot be locked"
        if self.wanted is None:
            return f"{self.name} {self.installed} is installed, but not locked"
        if self.installed is None:
            return f"{self.name} {self.wanted} is locked, but it is not installed or not allowed"
        if self.installed == self.wanted:
            return f"{self.name} {self.wanted}: its files differ from the locked ones"
        return f"{self.name}: {self.wanted} is locked, {self.installed} is installed"


def differences(locked: LockFile, here: Mapping[str, LockedPlugins]) -> list[Difference]:
    """Return each distribution that differs from the locked one. here: what `installed`
    returned."""
    changes = []
    for name in sorted({*locked.distributions, *here}):
        wanted = locked.distributions.get(name)
        entry = here.get(name)
        if wanted != entry:
            changes.append(
                Difference(
                    name, wanted.version if wanted else None, entry.version if entry else None
                )
            )
    for name, wanted_version in sorted(locked.requirements.items()):
        if wanted_version != installed_version(name):
            changes.append(Difference(name, wanted_version, installed_version(name)))
    return changes


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check(registry: Registry, path: str) -> None:
    """Raise ConfigError, which lists all differences, if the plugins are not those of the lock
    file."""
    locked = read(Path(path).expanduser())
    if changes := differences(locked, installed(registry, locked.distributions)):
        message = "\n  ".join(map(str, changes))
        raise ConfigError(
            f"the plugins differ from {path}:\n  {message}\nrun pegboard plugins sync {path}, or "
            "lock them again"
        )
