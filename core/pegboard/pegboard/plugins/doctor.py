"""What may be wrong with the installed plugins, as findings. Reads specs, probes, and asks each hook plugin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec

from pegboard.errors import PegboardError, PluginError
from pegboard.interfaces.hooks import Finding
from pegboard.interfaces.spec import Broken
from pegboard.plugins.discovery import Entry
from pegboard.plugins.importing import incompatibility
from pegboard.plugins.registry import Registry
from pegboard.plugins.spec_cost import BUDGET_MS, measure


def examine(registry: Registry) -> list[Finding]:
    """All findings, problems first."""
    findings = [
        *_duplicates(registry),
        *_conflicts(registry),
        *(Finding("problem", item.entry.id, item.reason) for item in registry.scan.unusable),
        *_requirements(registry),
        *_specs(registry),
        *_hooks(registry),
    ]
    return sorted(findings, key=lambda finding: (finding.level != "problem", finding.subject, finding.text))


def _duplicates(registry: Registry) -> Iterator[Finding]:
    for item in registry.scan.duplicates:
        subject = f"{item.distribution} {item.version}"
        where = f"also found in {item.location}, after {item.used_version} in {item.used_location}, which is used"
        if item.same:
            yield Finding("note", subject, f"{where}; both say the same")
        else:
            yield Finding("problem", subject, f"{where}; they differ: remove the stale one")


def _conflicts(registry: Registry) -> Iterator[Finding]:
    by_name: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in registry.scan.entries:
        if not registry.policy.blocked(entry):
            by_name[entry.kind, entry.name].append(entry)
    for (kind, name), entries in sorted(by_name.items()):
        if len(entries) < 2:
            continue
        try:
            registry.find(kind, name)
        except PluginError as error:
            yield Finding("problem", f"{kind}:{name}", str(error))


def _requirements(registry: Registry) -> Iterator[Finding]:
    """Requirements of the plugins' distributions that are missing or too old; extras are not asked for."""
    from importlib.metadata import PackageNotFoundError, requires

    for name in sorted({entry.distribution for entry in registry.scan.all_entries()}):
        try:
            wanted = requires(name) or []
        except PackageNotFoundError:
            continue
        for text in wanted:
            reason = _unmet_requirement(text)
            if reason:
                yield Finding("problem", name, reason)


def _unmet_requirement(text: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement

    requirement = Requirement(text)
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return None
    name, specifier = requirement.name, requirement.specifier
    try:
        here = version(name)
    except PackageNotFoundError:
        return f"requires {text}, which is not installed: pip install '{text}'"
    if specifier and not specifier.contains(here, prereleases=True):
        return f"requires {text}, but {name} {here} is installed"
    return None


def _specs(registry: Registry) -> Iterator[Finding]:
    allowed = [entry for entry in registry.scan.entries if not registry.policy.blocked(entry)]
    for entry, cost in measure(allowed).items():
        if cost.error:
            yield Finding("problem", entry.id, cost.error.removeprefix(f"{entry.id}: "))
            continue
        if cost.heavy:
            yield Finding("problem", entry.id, f"its spec's module imports {', '.join(cost.heavy)}: name those parts as strings")
        elif cost.ms > BUDGET_MS:
            yield Finding("problem", entry.id, f"its spec takes {cost.ms:.0f} ms to import, the budget is {BUDGET_MS:.0f} ms")
        if cost.effects:
            yield Finding("problem", entry.id, f"importing its spec changes {', '.join(cost.effects)}")
        yield from _parts(registry, entry)
        yield from _probe(registry, entry)


def _parts(registry: Registry, entry: Entry) -> Iterator[Finding]:
    """Whether the modules that the spec names exist; they are not run."""
    try:
        spec = registry.spec(entry)
    except PluginError:
        return  # `_probe` says so
    for part in ("implementation", "options", "suits", "validate"):
        path = getattr(spec, part, None) or ""  # not every kind has all of them
        module = path.partition(":")[0]
        if not module:
            continue
        try:
            missing = find_spec(module) is None
        except ModuleNotFoundError:
            missing = True
        if missing:
            yield Finding("problem", entry.id, f"{part} {path!r}: there is no module {module}")


def _probe(registry: Registry, entry: Entry) -> Iterator[Finding]:
    try:
        spec = registry.spec(entry)
        if reason := incompatibility(entry, spec):
            yield Finding("problem", entry.id, reason)
            return
        verdict = registry.verdict(entry)
    except PluginError as error:
        yield Finding("problem", entry.id, str(error).removeprefix(f"{entry.id}: "))
        return
    if isinstance(verdict, Broken):
        yield Finding("problem", entry.id, f"cannot work here: {verdict.reason}")
    if registry.policy.override and registry.policy.overrides(entry) and not spec.replaces:
        yield Finding("note", entry.id, "is in plugins.override, but replaces nothing")


def _hooks(registry: Registry) -> Iterator[Finding]:
    from pegboard.plugins.hooks import Hooks

    try:
        hooks = Hooks(registry)
        yield from hooks.doctor_checks()
    except PegboardError as error:
        yield Finding("problem", getattr(error, "plugin", None) or "hooks", str(error))
        return
    for name, reason in hooks.quarantined.items():
        yield Finding("problem", f"hooks:{name}", reason)
