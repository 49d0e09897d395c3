"""Plugins that are not installed: a class in a file (`--plugin FILE.py`), and a logits processor
that is named by its class (`--logits-processors module:Class`). They are for development. Each
becomes an `Entry` whose version is `UNINSTALLED`, and whose spec is made from the class
(`pegboard.plugins.class_specs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pegboard.errors import ConfigError, blame, did_you_mean
from pegboard.installed import Entry, normalized
from pegboard.interfaces import KINDS
from pegboard.plugins.discovery import UNINSTALLED, Scan
from pegboard.plugins.importing import import_part

NO_FILES = frozenset({"command", "platform"})
"""Kinds that are needed before the settings are read, or on which every other choice depends."""
_FORM = 'expected a class with plugin = "kind:name", such as plugin = "tool_parser:shout"'


def with_files(scan: Scan, files: Sequence[str]) -> Scan:
    """Return the scan with the plugins of these files, each of which is run. Raises ConfigError for
    a file that cannot be read or that has no plugin, and PluginBroken or PluginFailure if its code
    fails."""
    entries: list[Entry] = []
    for text in files:
        path = Path(text).expanduser().absolute()
        if path.suffix != ".py" or ":" in str(path) or not path.is_file():
            raise ConfigError(
                f"--plugin {text}: expected an existing Python file whose path has no colon, "
                "FILE.py"
            )
        entry = Entry("plugin", path.stem, normalized(path.name), UNINSTALLED, str(path), "")
        module = import_part(entry, str(path), "file")
        with blame(entry.id):  # a metaclass of the file may raise anything
            named = {
                name: value.__dict__["plugin"]
                for name, value in vars(module).items()
                if isinstance(value, type)
                and value.__module__ == module.__name__
                and "plugin" in value.__dict__
            }
            entries += [_entry(text, entry, name, plugin) for name, plugin in named.items()]
        if not named:
            raise ConfigError(f"--plugin {text}: the file declares no plugin, {_FORM}")
    return _joined(scan, entries)


def _entry(given: str, file: Entry, name: str, plugin: object) -> Entry:
    """Return the entry of the class `name` in a file. plugin: what the class says that it is."""
    kind, colon, short = plugin.partition(":") if isinstance(plugin, str) else ("", "", "")
    if not (kind and colon and short) or ":" in short:
        raise ConfigError(f"--plugin {given}: class {name} has plugin = {plugin!r}, {_FORM}")
    if kind not in KINDS:
        raise ConfigError(
            f"--plugin {given}: class {name} is of the unknown kind "
            f"{kind!r}{did_you_mean(kind, KINDS)}"
        )
    if kind in NO_FILES:
        message = f"class {name} is a {kind}, which must be installed"
        raise ConfigError(f"--plugin {given}: {message}: pegboard plugins new {kind} NAME")
    group = f"pegboard.{kind}.v{KINDS[kind].major}"
    return replace(file, kind=kind, name=short, value=f"{file.value}:{name}", group=group)


def with_classes(scan: Scan, kind: str, names: Iterable[str]) -> Scan:
    """Return the scan with an entry for each name of the form "module:Class" that is not
    "distribution:name" of an installed plugin. Nothing is imported."""
    installed = {entry.qualified for entry in scan.entries if entry.kind == kind}
    entries = []
    for name in dict.fromkeys(names):
        module, colon, path = name.partition(":")
        is_class = all(part.isidentifier() for part in (*module.split("."), *path.split(".")))
        if colon and is_class and f"{normalized(module)}:{path}" not in installed:
            group = f"pegboard.{kind}.v{KINDS[kind].major}"
            entries.append(Entry(kind, path, normalized(module), UNINSTALLED, name, group))
    return _joined(scan, entries)


def _joined(scan: Scan, entries: Sequence[Entry]) -> Scan:
    return replace(
        scan, entries=tuple(sorted({*scan.entries, *entries}, key=lambda entry: entry.sort_key))
    )
