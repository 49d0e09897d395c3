"""Measures plugins in a program of its own, so that what their imports do stays there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pegboard.interfaces import KINDS
from pegboard.plugins.discovery import Entry
from pegboard.plugins.importing import import_object

_MARK = "cost of a plugin: "


def measured(
    module: str, entries: Sequence[Entry], *words: str, limit_s: float | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Run `python -m module words…`, whose main program calls `answer`. Return the fields of what was measured, in the order of
    the entries, and the output for errors. If the program ends early, the answers are fewer."""
    ended = subprocess.run(
        [sys.executable, "-m", module, *words],
        input=json.dumps([asdict(entry) for entry in entries]),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    lines = [line.removeprefix(_MARK) for line in ended.stdout.splitlines() if line.startswith(_MARK)]
    return [json.loads(line) for line in lines], ended.stderr


def answer(measure: Callable[[Entry], Any]) -> None:
    """Measure the entries that stdin names. measure: returns a dataclass. The interfaces are imported first and do not count:
    core needs them anyway."""
    for kind in KINDS.values():
        import_object(kind.spec)
    for values in json.loads(sys.stdin.read()):
        print(_MARK + json.dumps(asdict(measure(Entry(**values)))), flush=True)
