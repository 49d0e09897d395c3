"""The interfaces for plugins: their size and their documentation."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pegboard.interfaces import KINDS
from pegboard_testing.authoring import snapshot

FILES = sorted(snapshot.INTERFACES.glob("*.py"))
MAX_METHODS = 7
HANDED_OUT = {"EngineClient", "Kind", "WorkerLike"}
"""Objects that core implements and passes to plugins. They are not counted."""


def protocols(path: Path) -> list[ast.ClassDef]:
    tree = ast.parse(path.read_text("utf-8"))
    return [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base) == "Protocol" for base in node.bases)
        and node.name not in HANDED_OUT
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_at_most_seven_methods(path: Path) -> None:
    for protocol in protocols(path):
        methods = [
            node.name
            for node in protocol.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert len([name for name in methods if name != "__init__"]) <= MAX_METHODS, (
            protocol.name,
            methods,
        )


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_kind_has_spec_and_words(kind: object) -> None:
    module, _, spec = kind.spec.partition(":")  # type: ignore[attr-defined]
    path = snapshot.INTERFACES / f"{module.rpartition('.')[2]}.py"
    tree = ast.parse(path.read_text("utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert spec in names
    assert ast.get_docstring(tree), path
