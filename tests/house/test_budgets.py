"""What must stay quick and light, measured in fresh interpreters. Times are the best of several runs, against budgets with
room for a busy machine; the tight numbers are `make bench`'s."""

from __future__ import annotations

import subprocess
import sys
import time

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
    code = "import pegboard.cli.serve, pegboard.async_llm, pegboard.plan, pegboard.server, pegboard.engine.remote"
    assert loaded_by(code, ("torch", "transformers")) == []


def test_import_time() -> None:
    code = "import time; start = time.perf_counter(); import pegboard; print(time.perf_counter() - start)"
    assert min(float(run(code)) for _ in range(3)) < 0.15


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plugins", "list"]], ids=" ".join)
def test_command_line_answers_at_once(arguments: list[str]) -> None:
    def seconds() -> float:
        started = time.perf_counter()
        result = subprocess.run(
            [sys.executable, "-m", "pegboard.cli.main", *arguments], capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return time.perf_counter() - started

    assert min(seconds() for _ in range(5)) < 0.6


ENTRY_POINTS = [(member, kind, name, value) for member in plugins() for kind, name, value in member.entry_points]


@pytest.mark.parametrize(("member", "kind", "name", "value"), ENTRY_POINTS, ids=[f"{k}:{n}" for _, k, n, _ in ENTRY_POINTS])
def test_spec_is_cheap_and_well_formed(member: Member, kind: str, name: str, value: str) -> None:
    """Every entry point keeps the contract that all kinds share."""
    from pegboard.testing.contract_generic import check_entry, installed_entry

    check_entry(installed_entry(kind, name))
