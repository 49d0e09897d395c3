"""`pegboard plugins doctor`: looks for problems with the installed plugins. It reads specs, runs
probes and calls each hook plugin."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from pegboard.config.sources import plugin_config
from pegboard.errors import PluginError
from pegboard.installed import Entry, distributions, normalized
from pegboard.interfaces import HOOKS_GROUP
from pegboard.interfaces.command import CommandSetup
from pegboard.interfaces.hooks import Finding
from pegboard.plugins.discovery import UNINSTALLED, outdated
from pegboard.plugins.importing import import_part, import_spec, incompatibility
from pegboard.plugins.policy import overrides
from pegboard.plugins.registry import Registry
from pegboard_doctor import programs
from pegboard_doctor.source_code import missing
from pegboard_doctor.trials import Trial, tried

BUDGET_MS = 20.0
"""Processor time that a spec's module may take to import, after the kind's interface was
imported."""

WALL_FACTOR = 25.0
"""How many times the budget the import may take with waiting. A busy machine makes it slow, too."""

LIMIT_S = 10.0
"""After how long the import of a spec is interrupted."""

PARTS = ("adapters", "implementation", "options", "parts", "probe", "suits", "validate", "worker")
"""The fields of specs that name something heavy."""

HEAVY = ("torch", "transformers", "pydantic", "numpy", "tensorflow", "jax", "triton")


class Doctor:
    """The command `plugins doctor`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = setup.parser(
            prog="pegboard plugins doctor",
            description="Look for problems. The exit status is 1 if there is one.",
        )
        self._parser.add_argument(
            "--json", action="store_true", dest="as_json", help="machine-readable output"
        )

    def run(self, words: Sequence[str]) -> int:
        arguments = self._parser.parse(words)
        registry = Registry.discover(plugin_config())
        findings = examine(registry)
        problems = [finding for finding in findings if finding.level == "problem"]
        if arguments.as_json:
            print(
                json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False)
            )
        else:
            for finding in findings:
                print(f"{finding.level:<8} {finding.subject}: {finding.text}")
            number = len(registry.scan.entries) + len(registry.scan.hooks)
            print(
                f"{number} plugins, {len(problems)} problems, {len(findings) - len(problems)} notes"
            )
        return 1 if problems else 0


def examine(registry: Registry) -> list[Finding]:
    """Return all findings, problems first."""
    findings = [
        *_duplicates(sys.path),
        *_conflicts(registry),
        *(Finding("problem", item.entry.id, item.reason) for item in registry.scan.unusable),
        *_requirements(registry),
        *_specs(registry),
        *_hooks(registry),
    ]
    return sorted(
        findings, key=lambda finding: (finding.level != "problem", finding.subject, finding.text)
    )


def _duplicates(path: Iterable[str]) -> Iterator[Finding]:
    """Find distributions that are installed again later on `path` (a stale .egg-info, an editable
    install). The first is used."""
    used: dict[str, tuple[str, str, str]] = {}
    for folder in dict.fromkeys(path):
        for distribution, metadata in distributions(folder):
            this = (
                metadata["Version"],
                distribution.read_text("entry_points.txt") or "",
                folder or os.getcwd(),
            )
            first = used.setdefault(normalized(metadata["Name"]), this)
            if first is not this:
                where = f"also found in {this[2]}, after {first[0]} in {first[2]}, which is used"
                subject = f"{normalized(metadata['Name'])} {this[0]}"
                if first[:2] == this[:2]:
                    yield Finding("note", subject, f"{where}; both say the same")
                else:
                    yield Finding("problem", subject, f"{where}; they differ: remove the stale one")


def _conflicts(registry: Registry) -> Iterator[Finding]:
    for kind, name in sorted(
        {(entry.kind, entry.name) for entry in registry.scan.entries if not registry.blocked(entry)}
    ):
        try:
            registry.find(kind, name)
        except PluginError as error:
            yield Finding("problem", f"{kind}:{name}", str(error))


def _requirements(registry: Registry) -> Iterator[Finding]:
    """Find requirements of the plugins' distributions that are missing or too old. Requirements of
    extras are ignored."""
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    def installed(distribution: str) -> str | None:
        try:
            return version(distribution)
        except PackageNotFoundError:
            return None

    for name in sorted({entry.distribution for entry in registry.scan.all_entries()}):
        for text in (requires(name) or []) if installed(name) else []:
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            here = installed(requirement.name)
            if here is None:
                yield Finding(
                    "problem",
                    name,
                    f"requires {text}, which is not installed: pip install '{text}'",
                )
            elif requirement.specifier and not requirement.specifier.contains(
                here, prereleases=True
            ):
                yield Finding(
                    "problem", name, f"requires {text}, but {requirement.name} {here} is installed"
                )


def _specs(registry: Registry) -> Iterator[Finding]:
    allowed = [entry for entry in registry.scan.entries if not registry.blocked(entry)]
    for entry in [entry for entry in allowed if entry.version == UNINSTALLED]:
        try:
            registry.spec(entry)
            yield Finding(
                "note",
                entry.id,
                "is a file for development: make it a package before others use it",
            )
        except PluginError as error:
            yield Finding("problem", entry.id, str(error).removeprefix(f"{entry.id}: "))
    costs = measure(entry for entry in allowed if entry.version != UNINSTALLED)
    trials = tried(entry for entry, cost in costs.items() if not cost.error)
    for entry, cost in costs.items():
        if cost.error:
            yield Finding("problem", entry.id, cost.error.removeprefix(f"{entry.id}: "))
            continue
        if cost.heavy:
            yield Finding(
                "problem",
                entry.id,
                f"its spec's module imports {', '.join(cost.heavy)}: name those parts as strings",
            )
        elif cost.is_slow:
            slow = (
                f"its spec takes {max(cost.ms, cost.wall_ms):.0f} ms to import, the budget is "
                f"{BUDGET_MS:.0f} ms"
            )
            yield Finding(
                "problem", entry.id, f"{slow}: import, read and wait for less in its module"
            )
        if cost.effects:
            yield Finding(
                "problem", entry.id, f"importing its spec changes {', '.join(cost.effects)}"
            )
        yield from _judge(registry, entry, trials[entry])


def _judge(registry: Registry, entry: Entry, trial: Trial) -> Iterator[Finding]:
    """Check whether what the spec names exists and has the methods of its interface, without
    running it. trial: what its probe finds."""
    for reason in filter(None, (trial.stuck, trial.error)):
        yield Finding("problem", entry.id, reason.removeprefix(f"{entry.id}: "))
    if trial.stuck:
        return
    try:
        spec = registry.spec(entry)
        for part in PARTS:
            path = getattr(spec, part, None) or ""  # no kind has all of these fields
            module = path.partition(":")[0]
            if module and not _exists(module):
                yield Finding("problem", entry.id, f"{part} {path!r}: there is no module {module}")
            elif module and (wrong := missing(entry.kind, part, path)):
                yield Finding("problem", entry.id, f"{part} {path!r}: {wrong}")
    except PluginError:
        return  # the trial has told
    if unfit := incompatibility(entry, spec):
        yield Finding("problem", entry.id, unfit)
    elif trial.broken:
        yield Finding("problem", entry.id, f"cannot work here: {trial.broken}")
    if advice := outdated(entry):
        yield Finding("note", entry.id, f"is {advice}")
    if overrides(registry.config, entry) and not spec.replaces:
        yield Finding("note", entry.id, "is in plugins.override, but replaces nothing")


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _hooks(registry: Registry) -> Iterator[Finding]:
    for entry, trial in tried(registry.enabled_hooks()).items():
        for level, subject, text in trial.findings:
            yield Finding("note" if level == "note" else "problem", subject, text)
        for reason in filter(None, (trial.stuck, trial.error, trial.broken)):
            yield Finding("problem", entry.id, reason.removeprefix(f"{entry.id}: "))


# --- what specs cost ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """What the import of a spec costs. ms: processor time. wall_ms: the time that passed. heavy:
    imported third-party modules that a spec must not import. effects: what it changed outside its
    module (environment, root logger). error: why it cannot be imported, "" if it can."""

    ms: float
    wall_ms: float = 0.0
    heavy: Sequence[str] = ()
    effects: Sequence[str] = ()
    error: str = ""

    @property
    def is_slow(self) -> bool:
        return max(self.ms, self.wall_ms / WALL_FACTOR) > BUDGET_MS


def measure(entries: Iterable[Entry]) -> dict[Entry, Cost]:
    """Measure the cost of each entry in a fresh interpreter. If several entries are in one module,
    the first one gets the cost. An entry over the budget is measured a second time, because the
    first import after an installation also compiles."""
    costs = _run(entries)
    for entry in [entry for entry, cost in costs.items() if cost.is_slow and not cost.error]:
        costs[entry] = min([costs[entry], *_run([entry]).values()], key=lambda cost: cost.ms)
    return costs


def _run(entries: Iterable[Entry]) -> dict[Entry, Cost]:
    answers = programs.examined("pegboard_doctor.doctor", entries, limit_s=LIMIT_S)
    return {
        entry: Cost(0.0, error=fields) if isinstance(fields, str) else Cost(**fields)
        for entry, fields in answers.items()
    }


def _cost(entry: Entry) -> Cost:
    modules = set(sys.modules)
    before = _surroundings()
    error = ""
    start = time.process_time()
    started = time.perf_counter()
    try:
        if entry.group == HOOKS_GROUP:
            import_part(entry, entry.value, "hooks")
        else:
            import_spec(entry)
    except PluginError as failure:
        error = str(failure)
    ms = (time.process_time() - start) * 1e3
    wall_ms = (time.perf_counter() - started) * 1e3
    pulled = {name.partition(".")[0] for name in set(sys.modules) - modules}
    effects = [what for what, value in _surroundings().items() if value != before[what]]
    return Cost(ms, wall_ms, [name for name in HEAVY if name in pulled], effects, error)


def _surroundings() -> dict[str, object]:
    root = logging.getLogger()
    return {
        "the environment": dict(os.environ),
        "the root logger": (root.level, len(root.handlers), len(root.filters)),
        "sys.path": list(sys.path),
        "the working directory": os.getcwd(),
    }


if __name__ == "__main__":
    programs.answer(_cost)
