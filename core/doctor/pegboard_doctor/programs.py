"""Runs the code of plugins in a program of its own, so that what it does stays there, and a plugin
that hangs or exits stops nothing else."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from pegboard.errors import PegboardError
from pegboard.installed import Entry
from pegboard.interfaces import KINDS
from pegboard.plugins.importing import import_object

START_S = 120.0
"""Seconds that the program may take until it begins with the first plugin."""

_MARK = "pegboard-plugin "
_STAGE = f"{_MARK}stage: "
_FOUND = f"{_MARK}found: "


def examined(
    module: str, entries: Iterable[Entry], *words: str, limit_s: float
) -> dict[Entry, dict[str, Any] | str]:
    """Run `python -m module words…`, whose main program calls `answer`. Return for each entry the
    fields of what was found, or why there are none: it takes more than `limit_s` seconds, or it
    ends the program, which is then started again for the rest. Raises PegboardError if the program
    does not start."""
    pending = list(entries)
    results: dict[Entry, dict[str, Any] | str] = {}
    while pending:
        answers, why = _run(module, pending, words, limit_s)
        results |= zip(pending, [*answers, why], strict=False)
        pending = pending[len(answers) + 1 :]
    return results


def _run(
    module: str, entries: Sequence[Entry], words: Sequence[str], limit_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Return the answers up to the entry that hangs or ends the program, and what that entry
    did."""
    given = json.dumps([asdict(entry) for entry in entries])
    answers: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryFile() as errors,
        limited([sys.executable, "-m", module, *words], stderr=errors) as program,
    ):
        assert program.stdin is not None and program.stdout is not None
        with suppress(BrokenPipeError):
            program.stdin.write(given.encode())
            program.stdin.close()
        running = ""
        seconds = START_S
        rest = b""
        while len(answers) < len(entries):
            if not select.select([program.stdout], [], [], seconds)[0]:
                return (
                    answers,
                    f"{running or 'the start of the program'} takes more than {seconds:g} s",
                )
            if not (new := os.read(program.stdout.fileno(), 1 << 16)):
                break
            *lines, rest = (rest + new).split(b"\n")
            for line in (line.decode(errors="replace") for line in lines):
                if line.startswith(_FOUND):
                    answers.append(json.loads(line.removeprefix(_FOUND)))
                elif line.startswith(_STAGE):
                    running = line.removeprefix(_STAGE)
                    seconds = limit_s
        if not running and len(answers) < len(entries):
            errors.seek(0)
            message = errors.read().decode(errors="replace").strip()
            raise PegboardError(f"the program that runs the plugins failed: {message[-2000:]}")
        return answers, f"{running} ends the interpreter"


@contextmanager
def limited(command: Sequence[str], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with this interpreter's module path, and end it and its children with the
    block."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **more.pop("env", {}),
    }
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} | more
    program: subprocess.Popen[bytes]
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as program:
        try:
            yield program
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(program.pid, signal.SIGKILL)


def stage(name: str) -> None:
    """Say which part of the plugin is run next. The time limit begins again."""
    print(f"\n{_STAGE}{name}", flush=True)


def answer(find: Callable[[Entry], Any]) -> None:
    """Examine the entries that stdin names. find: returns a dataclass. The interfaces are imported
    first and do not count: core needs them anyway."""
    for kind in KINDS.values():
        import_object(kind.spec)
    for values in json.loads(sys.stdin.read()):
        stage("importing it")
        print(f"\n{_FOUND}{json.dumps(asdict(find(Entry(**values))))}", flush=True)
