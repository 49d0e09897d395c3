"""Which modules may import which."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from import_graph import cycles, imported_modules, modules
from members import ROOT, Member, imports, members, plugins

PUBLIC = ("interfaces", "layers", "ops", "data", "errors", "log", "env")
"""The parts of the package `pegboard` that a plugin may import."""
SERVER_KINDS = {"api", "command"}
"""The kinds whose plugins may import pegboard_server."""
LAZY_KINDS = {"command"}
"""The kinds whose plugins may use the names of the package `pegboard` itself, such as `from
pegboard import LLM`."""


def test_rows_of_core() -> None:
    """The contracts in pyproject.toml hold."""
    tool = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout


def allowed(member: Member) -> tuple[str, ...]:
    """The packages and modules of core that the product code of a distribution may import,
    including their submodules."""
    kinds = {kind for kind, _, _ in member.entry_points}
    return (
        *(f"pegboard.{name}" for name in PUBLIC),
        "pegboard_chat",
        "pegboard_drafts",
        "pegboard_executors",
        "pegboard_gpus",
        "pegboard_kv",
        "pegboard_media",
        "pegboard_models",
        "pegboard_weights",
        *(["pegboard_server"] if kinds & SERVER_KINDS else []),
    )


def is_allowed(module: str, member: Member, names: Iterable[str] = ()) -> bool:
    """Returns whether `member` may import `module`. names: the names that it imports from it, for
    `from pegboard import LLM`."""
    core = {other.module for other in members() if other.is_core}
    others = {other.module for other in plugins()} - {member.module}
    top = module.partition(".")[0]
    if top == member.module or top not in core | others:
        return True
    if module == "pegboard":
        return bool({kind for kind, _, _ in member.entry_points} & LAZY_KINDS) or set(names) <= set(
            PUBLIC
        )
    return any(module == public or module.startswith(f"{public}.") for public in allowed(member))


def outside_the_public_surface(member: Member) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in member.sources()
        for module, line, names in imported_modules(path)
        if not is_allowed(module, member, names)
    ]


@pytest.mark.parametrize("member", plugins(), ids=lambda member: member.name)
def test_plugins_import_the_public_surface_only(member: Member) -> None:
    wrong = outside_the_public_surface(member)
    assert not wrong, "\n".join(wrong)


def test_pegboard_chat_imports_what_a_plugin_may() -> None:
    (chat,) = (member for member in members() if member.name == "pegboard-chat")
    wrong = outside_the_public_surface(chat)
    assert not wrong, "\n".join(wrong)


def test_core_imports_no_plugin() -> None:
    """The package `pegboard` does not import the other distributions below core/ either."""
    names = {member.module for member in plugins()}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for member in members()
        if member.is_core
        for path in member.sources()
        for module, line in imports(path)
        if module.partition(".")[0] in names
        or (member.name == "pegboard" and module.startswith("pegboard_"))
    ]
    assert not wrong, "\n".join(wrong)


# --- cycles ---------------------------------------------------------------------------------------


def test_no_files_import_each_other() -> None:
    """Type-only and function-local imports count. Imports of a parent package that Python makes by
    itself do not count."""
    wrong = [" ⇄ ".join(sorted(cycle)) for cycle in cycles(modules())]
    assert not wrong, "\n".join(wrong)


def test_no_packages_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for name, targets in modules().items():
        top = name.partition(".")[0]
        graph.setdefault(top, set()).update(
            {target.partition(".")[0] for target in targets} - {top}
        )
    assert cycles(graph) == []


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [frozenset("abc")]
    assert cycles({"a": {"b"}, "b": set()}) == []
