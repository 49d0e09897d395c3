"""Measures, in a fresh interpreter, what importing specs costs and changes.

`measure(entries)` starts `python -m pegboard.plugins.spec_cost`, which reads entries as JSON from stdin and answers one
JSON line per entry. A spec that kills its interpreter is found by the missing line.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from pegboard.errors import PluginError
from pegboard.interfaces import HOOKS_GROUP, KINDS
from pegboard.plugins.discovery import Entry
from pegboard.plugins.importing import import_object, import_part, import_spec

BUDGET_MS = 20.0
"""Processor time a spec's module may take to import, after the kind's interface is imported."""

HEAVY = ("torch", "transformers", "pydantic", "numpy", "tensorflow", "jax", "triton")
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Cost:
    """ms: processor time. heavy: third-party modules it pulled in that a spec must not. effects: what it changed beside
    its own module (environment, root logger). error: why it does not import, "" if it does."""

    ms: float
    heavy: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    error: str = ""


def measure(entries: Iterable[Entry]) -> dict[Entry, Cost]:
    """Cost per entry. Several entries of one module: the first one pays. Over budget is measured a second time, since the
    first import of a fresh installation compiles."""
    pending = list(entries)
    costs: dict[Entry, Cost] = {}
    while pending:
        found = _run(pending)
        costs |= found
        rest = pending[len(found) :]
        if rest:  # the interpreter died in the first of them
            costs[rest[0]] = Cost(0.0, error="importing it ends the interpreter")
        pending = rest[1:]
    slow = [entry for entry, cost in costs.items() if cost.ms > BUDGET_MS]
    for entry in slow:
        again = _run([entry]).get(entry)
        if again is not None and again.ms < costs[entry].ms:
            costs[entry] = again
    return costs


def _run(entries: list[Entry]) -> dict[Entry, Cost]:
    path = os.pathsep.join(part for part in sys.path if part)
    result = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([asdict(entry) for entry in entries]),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    rows = [json.loads(line.removeprefix(_MARK)) for line in result.stdout.splitlines() if line.startswith(_MARK)]
    return {
        entry: Cost(row["ms"], tuple(row["heavy"]), tuple(row["effects"]), row["error"])
        for entry, row in zip(entries, rows, strict=False)
    }


_MARK = "spec-cost "


def _main() -> None:
    for values in json.loads(sys.stdin.read()):
        print(_MARK + json.dumps(asdict(_cost(Entry(**values)))), flush=True)


def _cost(entry: Entry) -> Cost:
    for kind in KINDS.values():  # the interfaces are core's cost, also those of the pack's other kinds
        import_object(kind.spec)
    modules, before = set(sys.modules), _surroundings()
    error = ""
    start = time.process_time()
    try:
        if entry.group == HOOKS_GROUP:
            import_part(entry, entry.value, "hooks")
        else:
            import_spec(entry)
    except PluginError as failure:
        error = str(failure)
    ms = (time.process_time() - start) * 1e3
    pulled = {name.partition(".")[0] for name in set(sys.modules) - modules}
    effects = [what for what, value in _surroundings().items() if value != before[what]]
    return Cost(ms, tuple(name for name in HEAVY if name in pulled), tuple(effects), error)


def _surroundings() -> dict[str, object]:
    root = logging.getLogger()
    return {
        "the environment": dict(os.environ),
        "the root logger": (root.level, len(root.handlers), len(root.filters)),
        "sys.path": list(sys.path),
        "the working directory": os.getcwd(),
    }


if __name__ == "__main__":
    _main()
