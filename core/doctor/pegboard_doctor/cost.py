"""`pegboard plugins cost`: what each plugin's code costs at start-up.

A program of its own imports torch and numpy once. For each plugin it forks, and the child imports
the plugin's spec and then its implementation. So every plugin is measured alone, and a plugin that
hangs or crashes stops nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from pegboard.config.sources import plugin_config
from pegboard.errors import ConfigError, PegboardError
from pegboard.installed import Entry
from pegboard.interfaces import KINDS
from pegboard.interfaces.command import CommandSetup
from pegboard.plugins.importing import import_part, import_spec
from pegboard.plugins.names import check_kind
from pegboard.plugins.registry import Registry
from pegboard_doctor import programs
from pegboard_doctor.choices import decide

LIMIT_S = 30
SHARED = ("numpy", "msgspec", "torch")
"""What the engine imports anyway. It is not counted for any plugin."""


@dataclass(frozen=True, slots=True)
class ImportCost:
    """What one plugin costs beyond what is shared. spec_ms, code_ms: wall time of the import of its
    spec and of its implementation. kilobytes: growth of the process's memory, 0 where the system
    does not say. modules: number of modules that were imported. error: why it could not be
    imported, or ""."""

    spec_ms: float = 0.0
    code_ms: float = 0.0
    kilobytes: int = 0
    modules: int = 0
    error: str = ""


class Cost:
    """The command `plugins cost`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        description = (
            "Import plugins, each alone, and show the time and the memory that this takes beyond "
            "torch and numpy."
        )
        parser = self._parser = setup.parser(prog="pegboard plugins cost", description=description)
        parser.add_argument(
            "plugin", nargs="?", metavar="KIND[:NAME]", help="only this kind or plugin"
        )
        parser.add_argument(
            "--model", metavar="REF", help="only the plugins that are chosen for serving this model"
        )
        parser.add_argument(
            "--json", action="store_true", dest="as_json", help="machine-readable output"
        )

    def run(self, words: Sequence[str]) -> int:
        """Return 0, or 1 if a plugin could not be imported."""
        arguments = self._parser.parse(words)
        config = plugin_config()
        if arguments.model is not None:
            registry, _ = decide(arguments.model, config)
            entries = [
                decision.winner
                for decision in registry.decisions.values()
                if decision.winner is not None
            ]
            entries += [
                entry for kind in KINDS if KINDS[kind].ambient for entry in registry.enabled(kind)
            ]
        else:
            registry = Registry.discover(config)
            entries = [entry for kind in KINDS for entry in registry.entries(kind)]
        if arguments.plugin is not None:
            entries = _only(entries, arguments.plugin)
        costs = measured(sorted(set(entries), key=lambda entry: entry.sort_key))
        costs = dict(sorted(costs.items(), key=lambda item: -(item[1].spec_ms + item[1].code_ms)))
        if arguments.as_json:
            print(json.dumps([{**_named(entry), **asdict(cost)} for entry, cost in costs.items()]))
        else:
            print(_table(costs))
        return 1 if any(cost.error for cost in costs.values()) else 0


def _named(entry: Entry) -> dict[str, str]:
    return {"kind": entry.kind, "name": entry.name, "distribution": entry.distribution}


def _only(entries: Iterable[Entry], text: str) -> list[Entry]:
    kind, _, name = text.partition(":")
    check_kind(kind)
    matching = [
        entry
        for entry in entries
        if entry.kind == kind and name in ("", entry.name, entry.qualified)
    ]
    if not matching:
        raise ConfigError(f"no plugin {text} is installed and allowed; see pegboard plugins list")
    return matching


def measured(entries: Sequence[Entry]) -> dict[Entry, ImportCost]:
    """Measure plugins in a program of its own. Raises PegboardError if the program fails."""
    costs = programs.examined("pegboard_doctor.cost", entries, limit_s=2 * LIMIT_S)
    return {
        entry: ImportCost(error=each) if isinstance(each, str) else ImportCost(**each)
        for entry, each in costs.items()
    }


def _table(costs: dict[Entry, ImportCost]) -> str:
    lines = [f"{'PLUGIN':<40} {'SPEC':>9} {'CODE':>9} {'MEMORY':>9} {'MODULES':>7}"]
    for entry, cost in costs.items():
        message = (
            f"{cost.spec_ms:>6.1f} ms {cost.code_ms:>6.1f} ms {cost.kilobytes / 1024:>6.1f} MB "
            f"{cost.modules:>7}"
        )
        lines.append(f"{f'{entry.kind}:{entry.name}':<40} {cost.error or message}")
    return "\n".join(lines)


# --- the program that measures --------------------------------------------------------------------


def _alone(entry: Entry) -> ImportCost:
    """Measure in a child process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(LIMIT_S)
            os.write(write, json.dumps(asdict(_imported(entry))).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    _, code = os.waitpid(pid, 0)
    if not answer:
        is_late = os.WIFSIGNALED(code) and os.WTERMSIG(code) == signal.SIGALRM
        return ImportCost(
            error=f"it takes more than {LIMIT_S} s"
            if is_late
            else f"the import ended the process ({code})"
        )
    return ImportCost(**json.loads(answer))


def _imported(entry: Entry) -> ImportCost:
    before = program_kilobytes()
    modules = len(sys.modules)
    start = time.perf_counter()
    try:
        spec = import_spec(entry)
        spec_ms = (time.perf_counter() - start) * 1e3
        start = time.perf_counter()
        for path in (getattr(spec, part, None) for part in ("implementation", "worker")):
            if path:
                import_part(entry, path, "implementation")
    except PegboardError as error:
        return ImportCost(error=str(error))
    code_ms = (time.perf_counter() - start) * 1e3
    return ImportCost(
        spec_ms, code_ms, max(program_kilobytes() - before, 0), len(sys.modules) - modules
    )


def program_kilobytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE") // 1024


if __name__ == "__main__":
    for name in SHARED:
        with suppress(ImportError):
            import_module(name)
    programs.answer(_alone)
