"""Start-up must stay quick and light. It is measured in fresh interpreters, in processor time, as the best of several runs, so
that a busy machine has little effect. `make bench` measures wall-clock time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from members import Member, plugins

HEAVY = ("torch", "transformers", "numpy", "pydantic", "starlette", "zmq", "msgspec")


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def loaded_by(code: str, names: tuple[str, ...]) -> list[str]:
    return run(f"{code}\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules])").split()


def test_import_pegboard_imports_nothing_heavy() -> None:
    assert loaded_by("import pegboard", HEAVY) == []


def test_api_process_imports_no_torch() -> None:
    code = "import pegboard_server.serve, pegboard_server.server, pegboard.front.async_llm, pegboard.engine.boundary.client"
    assert loaded_by(code, ("torch", "transformers")) == []


def processor_seconds(*command: str) -> float:
    """The processor time of a program that must succeed, in seconds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_import_time() -> None:
    code = "import time; start = time.process_time(); import pegboard; print(time.process_time() - start)"
    assert min(float(run(code)) for _ in range(5)) < 0.15


@pytest.mark.parametrize(("words", "limit"), [("--help", 0.3), ("--version", 0.2), ("plugins list", 0.6)])
def test_command_line_answers_at_once(words: str, limit: float) -> None:
    command = [sys.executable, "-m", "pegboard.cli.main", *words.split()]
    assert min(processor_seconds(*command) for _ in range(5)) < limit


ENTRY_POINTS = [(member, kind, name, value) for member in plugins() for kind, name, value in member.entry_points]


@pytest.mark.parametrize(("member", "kind", "name", "value"), ENTRY_POINTS, ids=[f"{k}:{n}" for _, k, n, _ in ENTRY_POINTS])
def test_spec_is_cheap_and_well_formed(member: Member, kind: str, name: str, value: str) -> None:
    """Every entry point keeps the contract that all kinds share."""
    from pegboard_testing.contract_generic import check_entry, installed_entry

    check_entry(installed_entry(kind, name))
