"""Which module imports which, read from the sources. Every import counts, wherever it is in the
file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from members import members, statements, tree_of


def imported_modules(path: Path) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yields (module, line, imported names) for every import of a file. Sources must use absolute
    imports only."""
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}:{node.lineno} is a relative import"
            yield node.module, node.lineno, tuple(alias.name for alias in node.names)


def module_name(path: Path, root: Path) -> str:
    """The dotted name of a source file. root: the folder that holds the package."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, set[str]]:
    """Every module of this repository → the modules that it imports. `from a import b` imports a.b
    if that is a module, else a."""
    files = {
        module_name(path, member.folder): path for member in members() for path in member.sources()
    }
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        targets = set()
        for module, _, names in imported_modules(path):
            inner = {f"{module}.{one}" for one in names}
            targets |= {one for one in inner if one in files}
            if not names or any(one not in files for one in inner):
                targets.add(module)
        graph[name] = (targets & set(files)) - {name}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """Returns the groups of nodes that reach each other (strongly connected components of two or
    more nodes). Uses Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(frozenset(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found
