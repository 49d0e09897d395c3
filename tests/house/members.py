"""The distributions of this repository, read from their pyproject files."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Member:
    """One distribution. folder: where its pyproject lies; module: its import package."""

    folder: Path
    name: str
    module: str
    project: tuple[tuple[str, Any], ...]

    @property
    def is_core(self) -> bool:
        """One of the distributions below `core/`, which plugins may import."""
        return self.folder.parent.name == "core"

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.project)

    @property
    def entry_points(self) -> list[tuple[str, str, str]]:
        """(kind, name, value) of every plugin it registers."""
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
    """Core first, then all plugins by path."""
    places = ("core/pegboard", "core/[!p]*", "plugins/*/*", "kernels/*", "contrib/*/*")
    files = [file for place in places for file in sorted(ROOT.glob(f"{place}/pyproject.toml"))]
    found = []
    for file in files:
        content = tomllib.loads(file.read_text("utf-8"))
        project = content["project"]
        found.append(Member(file.parent, project["name"], content["tool"]["flit"]["module"]["name"], tuple(project.items())))
    return found


def plugins() -> list[Member]:
    return [member for member in members() if not member.is_core]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import of a file, wherever it stands, absolute ones only."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
