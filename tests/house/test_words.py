"""Names of variables are nouns. A participle says what happened to a thing and not what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from members import ROOT, tree_of

PARTICIPLES = frozenset({"found", "made", "own", "said", "told"})
"""The most common ones."""


def variables(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each variable, parameter and attribute that is assigned, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def test_variables_are_nouns() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for folder in ("core", "plugins", "kernels", "contrib", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "tests" not in path.parts
        for name, line in variables(tree_of(path))
        if name.strip("_") in PARTICIPLES
    ]
    assert not wrong, "name the thing:\n" + "\n".join(wrong)
