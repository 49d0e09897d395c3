"""Core never spells a plugin's name; what it must say about plugins is generated data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from members import ROOT, members, plugins

from pegboard_testing.authoring.catalogue import main as catalogue

COMMON_WORDS = {"*", "none", "local", "log", "torch", "cpu", "health", "priority", "dummy", "hf", "gguf", "safetensors",
                "openai"}  # fmt: skip
"""Plugin names that are also words of the field: a torch dtype, a logger, a setting, a protocol. They are allowed as words;
choosing a plugin by them is what `test_choices_are_data` looks for."""


def strings(path: Path) -> Iterator[tuple[str, int]]:
    """String constants that are not docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value, node.lineno


def core_sources() -> list[Path]:
    return members()[0].sources()


def test_no_plugin_name_in_core() -> None:
    names = {name for member in plugins() for _, name, _ in member.entry_points} - COMMON_WORDS
    names |= {member.name for member in plugins()}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} spells {text!r}"
        for path in core_sources()
        for text, line in strings(path)
        if text in names
    ]
    assert not wrong, "\n".join(wrong)


def literal_choices(tree: ast.AST) -> Iterator[int]:
    """Lines where a plugin is looked up by a literal name."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        values = [keyword.value for keyword in node.keywords if keyword.arg == "explicit"]
        if node.func.attr == "find":
            values += node.args[1:2]
        yield from (value.lineno for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str))


def test_choices_are_data() -> None:
    """`find(kind, "name")`, `choose(…, explicit="name")` and their like never get a literal name."""
    sources = {path: ast.parse(path.read_text("utf-8")) for path in core_sources()}
    wrong = [f"{path.relative_to(ROOT)}:{line}" for path, tree in sources.items() for line in literal_choices(tree)]
    assert not wrong, "\n".join(wrong)


def test_catalogue_is_current() -> None:
    assert catalogue(["--check"]) == 0, "run `make docs`"
