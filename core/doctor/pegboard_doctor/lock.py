"""`pegboard plugins lock` pins the installed plugins in a file, `diff` compares the installation
with it, and `sync` restores it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from pegboard.config.schema import PluginConfig
from pegboard.config.sources import plugin_config
from pegboard.errors import ConfigError
from pegboard.interfaces.command import CommandSetup
from pegboard.plugins import lockfile
from pegboard.plugins.discovery import UNINSTALLED
from pegboard.plugins.lockfile import Difference, LockFile
from pegboard.plugins.registry import Registry
from pegboard.plugins.selection import Decision
from pegboard_doctor.choices import decide

FILE = "pegboard-lock.json"
LIMITS = (
    "The lock notices changed files of plugins and of Pegboard, bytecode that is not that of its "
    "source, links, a second distribution in a package, and sitecustomize. It pins torch and "
    "other requirements by version only, and does not protect from someone who can write to the "
    "folders of the interpreter."
)


class Lock:
    """The command `plugins lock`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        description = (
            "Write the plugins that may be used, with their versions and digests, to FILE "
            f"(default {FILE})."
        )
        self._parser = setup.parser(
            prog="pegboard plugins lock", description=description, epilog=LIMITS
        )
        self._parser.add_argument(
            "file", nargs="?", default=FILE, metavar="FILE", help="the file to write"
        )
        self._parser.add_argument(
            "--model", metavar="REF", help="also record the choices for serving this model"
        )

    def run(self, words: Sequence[str]) -> int:
        arguments = self._parser.parse(words)
        config = _unlocked()
        if config.files:
            raise ConfigError(
                f"plugins.files has {config.files[0]}, and a file cannot be locked: make it a "
                "package"
            )
        registry = Registry.discover(config)
        entries = (*registry.scan.entries, *registry.scan.hooks)
        allowed = {entry.distribution for entry in entries if not registry.blocked(entry)}
        needed = _requirements({lockfile.CORE, *allowed})
        kits = [name for name in needed if lockfile.CORE in map(_name, _required(name))]
        distributions = lockfile.installed(registry, kits)
        needed = {name: version for name, version in needed.items() if name not in distributions}
        folders = {name: folder for name in distributions if (folder := _folder(name))}
        decisions = _decisions(arguments.model, config) if arguments.model is not None else []
        lock = LockFile(1, distributions, needed, folders, arguments.model, decisions)
        try:
            Path(arguments.file).write_bytes(
                msgspec.json.format(msgspec.json.encode(lock, order="deterministic")) + b"\n"
            )
        except OSError as error:
            raise ConfigError(
                f"{arguments.file} cannot be written: {error.strerror or error}; name another file"
            ) from error
        print(
            f"{arguments.file}: {len(distributions)} distributions, {len(needed)} requirements, "
            f"{len(decisions)} choices"
        )
        print(
            f"pegboard serve --plugins-lock {shlex.quote(arguments.file)} starts with nothing else"
        )
        return 0


class Diff:
    """The command `plugins diff`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        description = (
            "Show what differs between a lock file and this installation: distributions, and "
            "choices for its model."
        )
        self._parser = setup.parser(prog="pegboard plugins diff", description=description)
        self._parser.add_argument(
            "file", nargs="?", default=FILE, metavar="FILE", help="the lock file"
        )

    def run(self, words: Sequence[str]) -> int:
        """Return 0, or 1 if anything differs."""
        locked = lockfile.read(Path(self._parser.parse(words).file))
        config = _unlocked()
        lines = [str(difference) for difference in _differences(locked, config)]
        if locked.model is not None:
            before = _winners(locked.decisions)
            now = _winners(_decisions(locked.model, config))
            for key in sorted({*before, *now}):
                old = before.get(key, "nothing")
                new = now.get(key, "nothing")
                if old != new:
                    lines.append(f"{key}: {old} was chosen for {locked.model}, now {new}")
        print("\n".join(lines) or "nothing differs")
        return 1 if lines else 0


class Sync:
    """The command `plugins sync`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        description = "Show the pip commands that restore the plugins of a lock file, or run them."
        self._parser = setup.parser(prog="pegboard plugins sync", description=description)
        self._parser.add_argument(
            "file", nargs="?", default=FILE, metavar="FILE", help="the lock file"
        )
        self._parser.add_argument("--yes", action="store_true", help="run the commands")

    def run(self, words: Sequence[str]) -> int:
        """Return 0, or 1 if the set could not be restored."""
        arguments = self._parser.parse(words)
        locked = lockfile.read(Path(arguments.file))
        commands = list(_commands(_differences(locked, _unlocked()), locked.folders))
        if not arguments.yes:
            print("\n".join(map(shlex.join, commands)) or "nothing to do")
            return 0
        for command in commands:
            print(shlex.join(command), flush=True)
            if subprocess.run(command, check=False).returncode:
                return 1
        # This interpreter may have imported older versions.
        diff = [sys.executable, "-m", "pegboard", "plugins", "diff", arguments.file]
        return subprocess.run(diff, check=False).returncode


def _unlocked() -> PluginConfig:
    """Return the rules without their lock, so that these commands work where a server refuses to
    start."""
    return msgspec.structs.replace(plugin_config(), lock=None)


def _differences(locked: LockFile, config: PluginConfig) -> list[Difference]:
    return lockfile.differences(
        locked, lockfile.installed(Registry.discover(config), locked.distributions)
    )


def _commands(differences: Iterable[Difference], folders: Mapping[str, str]) -> Iterable[list[str]]:
    """Return the pip commands. What came from a folder is installed from there, because an index
    may have another package of that name. Raises ConfigError for a name or a version that is not
    one, and for what pip cannot restore."""
    differences = list(differences)
    pip = [sys.executable, "-m", "pip"]
    pins = []
    for each in differences:
        if each.name in lockfile.STARTUP:
            raise ConfigError(
                f"{each}; pip does not manage this module: restore or remove it, or lock it again"
            )
        if each.wanted is not None and each.name in folders:
            folder = Path(folders[each.name])
            if not (folder.is_absolute() and (folder / "pyproject.toml").is_file()):
                message = (
                    f"{each.name} {each.wanted} was installed from {folder}, which is not a "
                    "package here"
                )
                raise ConfigError(f"{message}: install it from where it is now")
            pins.append(str(folder))
        elif each.wanted is not None:
            try:
                pins.append(
                    f"{canonicalize_name(each.name, validate=True)}=={Version(each.wanted)}"
                )
            except (InvalidName, InvalidVersion) as error:
                raise ConfigError(
                    f"the lock file names {each.name!r} {each.wanted!r}: {error}"
                ) from error
    if pins:
        yield [*pip, "install", "--no-deps", "--force-reinstall", *pins]
    if extra := [
        each.name for each in differences if each.wanted is None and each.installed != UNINSTALLED
    ]:
        yield [*pip, "uninstall", "--yes", *extra]


def _requirements(distributions: Iterable[str]) -> dict[str, str]:
    """Return name → version of what these distributions need, directly or not, and that is not one
    of them."""
    seen = set(distributions)
    versions: dict[str, str] = {}
    waiting = list(seen)
    while waiting:
        for text in _required(waiting.pop()):
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue  # `plugins doctor` reports it
            name = str(canonicalize_name(requirement.name))
            marker = requirement.marker
            if name in seen or not (marker is None or marker.evaluate({"extra": ""})):
                continue
            seen.add(name)
            if version := lockfile.installed_version(name):
                versions[name] = version
                waiting.append(name)
    return dict(sorted(versions.items()))


def _name(requirement: str) -> str:
    """Return the comparable name of the distribution that a requirement asks for, or "" if it is
    not one."""
    try:
        return str(canonicalize_name(Requirement(requirement).name))
    except InvalidRequirement:
        return ""


def _folder(name: str) -> str | None:
    """Return the folder from which a distribution was installed, or None if it came from
    elsewhere."""
    try:
        text = distribution(name).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    origin = json.loads(text) if text else {}
    return url2pathname(urlparse(origin["url"]).path) if "dir_info" in origin else None


def _required(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def _decisions(model: str, config: PluginConfig) -> list[Decision]:
    """Return what is chosen for the model on this machine, and why, sorted by kind and key."""
    registry, _ = decide(model, config)
    return [decision for _, decision in sorted(registry.decisions.items())]


def _winners(decisions: Iterable[Decision]) -> dict[str, str]:
    """Return "kind" or "kind key" → "distribution:name" of the winner."""
    return {
        f"{decision.kind} {decision.key}".rstrip(): decision.winner.qualified
        for decision in decisions
        if decision.winner is not None
    }
