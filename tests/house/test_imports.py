"""Who may import whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from members import ROOT, Member, imports, members, plugins

PUBLIC = {
    "pegboard.interfaces",
    "pegboard.layers",
    "pegboard.ops",
    "pegboard_chat.parsing",
    "pegboard_testing",
    "pegboard_chat",
    "pegboard.env",
    "pegboard.errors",
    "pegboard.log",
    "pegboard.data.batch",
    "pegboard.data.request",
    "pegboard.data.request_parts",
    "pegboard.data.output",
    "pegboard.data.sampling_params",
    "pegboard.data.pooling_params",
}
"""What a plugin may import of core."""


def test_rows_of_core() -> None:
    """The contracts in pyproject.toml hold."""
    tool = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("member", plugins(), ids=lambda member: member.name)
def test_plugins_import_the_public_surface_only(member: Member) -> None:
    others = {other.module for other in plugins()} - {member.module}
    wrong = []
    for path in member.sources():
        for module, line in imports(path):
            top = module.partition(".")[0]
            is_private = top == "pegboard" and module != "pegboard" and ".".join(module.split(".")[:2]) not in PUBLIC
            if is_private or top in others or module == "pegboard":
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_core_imports_no_plugin() -> None:
    names = {member.module for member in plugins()}
    core = members()[0]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in core.sources()
        for module, line in imports(path)
        if module.partition(".")[0] in names or module.startswith("pegboard_")
    ]
    assert not wrong, "\n".join(wrong)
