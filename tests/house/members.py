"""The distributions of this repository, read from their pyproject files, and the imports of their
sources."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core/pegboard/pegboard"


@dataclass(frozen=True)
class Member:
    """One distribution. folder: the folder of its pyproject.toml. module: the name of its import
    package."""

    folder: Path
    name: str
    module: str
    project: tuple[tuple[str, Any], ...]

    @property
    def is_core(self) -> bool:
        """True for the distributions below `core/`."""
        return self.folder.parent.name == "core"

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.project)

    @property
    def entry_points(self) -> list[tuple[str, str, str]]:
        """(kind, name, value) of every plugin that it registers."""
        groups = self.metadata.get("entry-points", {})
        return [
            (group.split(".")[1], name, value)
            for group, points in groups.items()
            if group.startswith("pegboard.")
            for name, value in points.items()
        ]

    def sources(self) -> list[Path]:
        return sorted((self.folder / self.module).rglob("*.py"))


@cache
def members() -> list[Member]:
    """All distributions: core first, then the plugins sorted by path."""
    places = ("core/pegboard", "core/[!p]*", "plugins/*/*", "kernels/*", "contrib/*/*")
    files = [file for place in places for file in sorted(ROOT.glob(f"{place}/pyproject.toml"))]
    found = []
    for file in files:
        content = tomllib.loads(file.read_text("utf-8"))
        project = content["project"]
        found.append(
            Member(
                file.parent,
                project["name"],
                content["tool"]["flit"]["module"]["name"],
                tuple(project.items()),
            )
        )
    return found


def core_members() -> list[Member]:
    return [member for member in members() if member.is_core]


def plugins() -> list[Member]:
    return [member for member in members() if not member.is_core]


# --- sources --------------------------------------------------------------------------------------


@cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all statements below a node. Expressions, which most of a tree consists of, are not
    searched."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from statements(child)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yields (module, line) for every absolute import in a file. Function-local and type-only
    imports are included."""
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno


def is_documentation(node: ast.AST) -> bool:
    """Whether a statement is a docstring of a module, class, function or attribute."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def num_statements(node: ast.AST) -> int:
    """Returns the number of statements in a module, class or function, without docstrings. Of a
    class or function, its own line does not count."""
    parts = (part for part in ast.walk(node) if isinstance(part, ast.stmt) and part is not node)
    return sum(not is_documentation(part) for part in parts)
