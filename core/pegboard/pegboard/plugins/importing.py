"""Runs the parts of a plugin that are needed before it is chosen: its spec and its probe.

Every failure becomes `PluginBroken` or `Broken`. A probe reads `ProbeFacts` and facts that are
cheap to get, such as files. It uses no device and imports nothing heavy, so it runs in this
process.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from pegboard.env import cpu_flags, usable_cpus
from pegboard.errors import PluginBroken, blame, did_you_mean
from pegboard.installed import Entry
from pegboard.interfaces import KINDS
from pegboard.interfaces.spec import Absent, Broken, Need, Ok, ProbeFacts, Spec, Verdict
from pegboard.plugins.class_specs import class_spec
from pegboard.plugins.discovery import UNINSTALLED


def import_object(path: str) -> Any:
    """Return the object at "module:OBJECT" (attributes may be dotted), or the module for "module".
    The module may be a file, "/path/FILE.py", which is run once per process."""
    module_name, _, attributes = path.partition(":")
    target: Any = (
        _import_file(module_name)
        if module_name.endswith(".py")
        else import_module(module_name.strip())
    )
    for attribute in filter(None, attributes.strip().split(".")):
        target = getattr(target, attribute)
    return target


def module_name(path: str) -> str:
    """Return the name of the module of "module:OBJECT" or "/path/FILE.py:OBJECT" in sys.modules."""
    name = path.partition(":")[0].strip()
    return (
        f"pegboard_file_{crc32(name.encode()):08x}_{Path(name).stem}"
        if name.endswith(".py")
        else name
    )


def _import_file(path: str) -> ModuleType:
    name = module_name(path)
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
        sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def import_part(entry: Entry, path: str, what: str) -> Any:
    """Import one part of a plugin. Raises PluginBroken, which says which part of which plugin
    failed, and why."""
    try:
        return import_object(path)
    except ModuleNotFoundError as error:
        package = path.partition(":")[0].partition(".")[0]
        advice = (
            f"reinstall {entry.distribution}"
            if (error.name or "").startswith(package)
            else f"is {error.name!r} installed?"
        )
        raise PluginBroken(
            f"{entry.id}: {what} {path!r} does not import: {error}; {advice}", plugin=entry.id
        ) from error
    except Exception as error:  # the import runs the plugin's code, which may raise anything
        advice = (
            "; move it to a module, which other processes can import"
            if path.startswith("__main__:")
            else ""
        )
        message = (
            f"{entry.id}: {what} {path!r} does not import: {type(error).__name__}: {error}{advice}"
        )
        raise PluginBroken(message, plugin=entry.id) from error


def import_spec(entry: Entry) -> Spec:
    """Import a plugin's spec object, which must be an instance of the kind's spec class. Raises
    PluginBroken."""
    expected: type[Spec] = import_object(KINDS[entry.kind].spec)
    if entry.version == UNINSTALLED:
        with blame(entry.id):
            spec = class_spec(entry, import_part(entry, entry.value, "class"), expected)
    else:
        spec = import_part(entry, entry.value, "spec")
    if not isinstance(spec, expected):
        actual = (
            f"the class {spec.__name__} itself"
            if isinstance(spec, type)
            else f"a {type(spec).__name__}"
        )
        message = (
            f"{entry.id}: {entry.value!r} is {actual}, expected a {expected.__name__} object; see "
            "pegboard.interfaces"
        )
        raise PluginBroken(message, plugin=entry.id)
    need_fields = {field.name for field in fields(need_class(entry.kind))}
    for what, given, known in (
        ("flags", spec.flags, expected.FLAGS),
        ("supports", spec.supports, need_fields),
    ):
        for word in sorted(set(given) - known):
            advice = did_you_mean(word, known) or f"; known: {', '.join(sorted(known)) or 'none'}"
            raise PluginBroken(
                f"{entry.id}: {what} has {word!r}, which {entry.kind} does not know{advice}",
                plugin=entry.id,
            )
    return spec


def need_class(kind: str) -> type[Need]:
    """Return the class that says what selection asks of `kind`: its own, or `Need` if it has
    none."""
    module, _, spec = KINDS[kind].spec.partition(":")
    need: type[Need] = getattr(import_module(module), spec.removesuffix("Spec") + "Need", Need)
    return need


def incompatibility(entry: Entry, spec: Spec) -> str | None:
    """Return why this core's interface does not serve the spec's `api`, or None if it does."""
    kind = KINDS[entry.kind]
    major, dot, minor = spec.api.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        return f'api={spec.api!r} is not of the form "major.minor"'
    if int(major) != entry.major:
        return f"is in the group {entry.group}, and its spec says api={spec.api!r}"
    if int(major) == kind.major and int(minor) > kind.minor:
        return (
            f"needs interface {kind.name} {spec.api}, this pegboard has "
            f"{kind.major}.{kind.minor}: upgrade pegboard"
        )
    return None


@cache
def probe_facts() -> ProbeFacts:
    """Return the facts of this machine."""
    return ProbeFacts(
        machine=platform.machine(), cpu_flags=cpu_flags(), num_cpus=len(usable_cpus())
    )


def run_probe(probe: Callable[[ProbeFacts], Verdict]) -> Verdict:
    """Return the probe's verdict. If the probe raises, or returns something else, the verdict is
    Broken."""
    try:
        verdict = probe(probe_facts())
    except Exception as error:  # noqa: BLE001
        # a probe must not raise; if it does, that is its verdict
        return Broken(f"the probe raised {type(error).__name__}: {error}")
    if not isinstance(verdict, Ok | Absent | Broken):
        return Broken(f"the probe returned {verdict!r}, expected Ok, Absent or Broken")
    return verdict
