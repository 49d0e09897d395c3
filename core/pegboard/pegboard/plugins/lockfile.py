"""The file that pins a set of plugins: `pegboard plugins lock` writes it, and `--plugins-lock FILE` refuses to start with another
set.

It names every distribution whose plugins may be used, with its version and a digest of its code, and the versions of all that
these need. The digest is of the files that would be imported, so that it also notices a change of an installed file. It is the
same for a wheel and for an editable installation of the same code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pegboard.data.checkpoint_file import read_text
from pegboard.errors import ConfigError, ModelError
from pegboard.plugins.discovery import UNINSTALLED, Entry
from pegboard.plugins.registry import Registry

CORE = "pegboard"


class LockedPlugins(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One distribution. digest: sha256 of its packages. plugins: "kind:name" of each of its plugins, sorted."""

    version: str
    digest: str
    plugins: list[str]


class LockFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """distributions: those with plugins, and pegboard. requirements: name → version of everything else that they need. model: the
    model for which the choices were made. choices: "kind" or "kind key" → "distribution:name" of the winner."""

    format: Literal[1]
    distributions: dict[str, LockedPlugins]
    requirements: dict[str, str] = {}
    model: str | None = None
    choices: dict[str, str] = {}


def read(path: Path) -> LockFile:
    """Read a lock file. Raises ConfigError."""
    try:
        return msgspec.json.decode(read_text(path), type=LockFile)
    except (ModelError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a lock file of plugins: {error}; see pegboard plugins lock") from error


def installed(registry: Registry) -> dict[str, LockedPlugins]:
    """Return what a lock file says about the distributions whose plugins the rules allow, and about pegboard."""
    found: dict[str, list[Entry]] = {CORE: []}
    for entry in (*registry.scan.entries, *registry.scan.hooks):
        if not registry.blocked(entry):
            found.setdefault(entry.distribution, []).append(entry)
    return {name: _locked(name, entries) for name, entries in sorted(found.items())}


def _locked(name: str, entries: Iterable[Entry]) -> LockedPlugins:
    versions = {entry.version for entry in entries} or {installed_version(name) or "unknown"}
    roots = {entry.value.partition(":")[0].partition(".")[0] for entry in entries} or {name}
    plugins = sorted(f"{entry.kind}:{entry.name}" for entry in entries)
    return LockedPlugins(", ".join(sorted(versions)), _digest(sorted(roots)), plugins)


def _digest(packages: Iterable[str]) -> str:
    """Return the sha256 of the files of these top-level packages, without the compiled files that Python keeps."""
    whole = hashlib.sha256()
    for package in packages:
        for name, path in sorted(_files(package)):
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
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                yield f"{package}/{path.relative_to(folder).as_posix()}", path
    if spec.submodule_search_locations is None and spec.origin is not None and Path(spec.origin).is_file():
        yield package, Path(spec.origin)


class Difference(NamedTuple):
    """wanted: the locked version, or None if the distribution is not locked. found: the version here, or None if it is not
    installed or not allowed. If both are equal, the files differ."""

    name: str
    wanted: str | None
    found: str | None

    def __str__(self) -> str:
        if self.found == UNINSTALLED:
            return f"{self.name} is not installed, so it cannot be locked"
        if self.wanted is None:
            return f"{self.name} {self.found} is installed, but not locked"
        if self.found is None:
            return f"{self.name} {self.wanted} is locked, but it is not installed or not allowed"
        if self.found == self.wanted:
            return f"{self.name} {self.wanted}: its files differ from the locked ones"
        return f"{self.name}: {self.wanted} is locked, {self.found} is installed"


def differences(locked: LockFile, here: Mapping[str, LockedPlugins]) -> list[Difference]:
    """Return each distribution that differs from the locked one. here: what `installed` returned."""
    found = []
    for name in sorted({*locked.distributions, *here}):
        wanted, own = locked.distributions.get(name), here.get(name)
        if wanted != own:
            found.append(Difference(name, wanted.version if wanted else None, own.version if own else None))
    for name, wanted_version in sorted(locked.requirements.items()):
        if wanted_version != installed_version(name):
            found.append(Difference(name, wanted_version, installed_version(name)))
    return found


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check(registry: Registry, path: str) -> None:
    """Raise ConfigError, which lists all differences, if the plugins are not those of the lock file."""
    if found := differences(read(Path(path).expanduser()), installed(registry)):
        told = "\n  ".join(map(str, found))
        raise ConfigError(f"the plugins differ from {path}:\n  {told}\nrun pegboard plugins sync {path}, or lock them again")
