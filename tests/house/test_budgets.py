"""Start-up must stay quick and light. It is measured in fresh interpreters, in processor time, as
the best of several runs, so that a busy machine has little effect. `make bench` measures wall-clock
time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from members import plugins

from pegboard_doctor.doctor import Cost, measure
from pegboard_testing.contract_generic import check_entry, installed_entry

HEAVY = ("torch", "transformers", "numpy", "pydantic", "starlette", "zmq", "msgspec")


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def loaded_by(code: str, names: tuple[str, ...]) -> list[str]:
    return run(
        f"{code}\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules])"
    ).split()


def test_import_pegboard_imports_nothing_heavy() -> None:
    assert loaded_by("import pegboard", HEAVY) == []


def test_api_process_imports_no_torch() -> None:
    code = (
        "import pegboard_server.serve, pegboard_server.server, pegboard.front.async_llm, "
        "pegboard.engine.boundary.client"
    )
    assert loaded_by(code, ("torch", "transformers")) == []


def processor_seconds(*command: str) -> float:
    """The processor time of a program that must succeed, in seconds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_import_time() -> None:
    code = (
        "import time; start = time.process_time(); import pegboard; print(time.process_time() - "
        "start)"
    )
    assert min(float(run(code)) for _ in range(5)) < 0.15


@pytest.mark.parametrize(
    ("words", "limit"), [("--help", 0.3), ("--version", 0.2), ("plugins list", 0.3)]
)
def test_command_line_answers_at_once(words: str, limit: float) -> None:
    command = [sys.executable, "-m", "pegboard.cli.main", *words.split()]
    assert min(processor_seconds(*command) for _ in range(5)) < limit


IDS = [f"{kind}:{name}" for member in plugins() for kind, name, _ in member.entry_points]


@pytest.fixture(scope="module")
def costs() -> dict[str, Cost]:
    """What each spec's import costs, all measured in one program: a module that several of them
    import counts for the first."""
    entries = [installed_entry(*each.split(":", 1)) for each in IDS]
    return dict(zip(IDS, measure(entries).values(), strict=True))


@pytest.mark.parametrize("each", IDS)
def test_spec_is_cheap_and_well_formed(each: str, costs: dict[str, Cost]) -> None:
    """Every entry point keeps the contract that all kinds share."""
    check_entry(installed_entry(*each.split(":", 1)), costs[each])
