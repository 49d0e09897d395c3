"""Writes the signatures of all interfaces as text, so that a review shows every change of the
contract.

One section per kind file: its classes with fields and method signatures, and its aliases, without
docstrings and bodies.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from pegboard import interfaces

INTERFACES = Path(interfaces.__file__).parent
SNAPSHOT = INTERFACES / "snapshot.txt"


def snapshot() -> str:
    """Return the signatures of all public names in `pegboard.interfaces`, file by file."""
    sections = []
    for path in sorted(INTERFACES.glob("*.py")):
        lines = list(_lines(ast.parse(path.read_text("utf-8")).body, ""))
        sections.append("\n".join([f"# {path.stem}", *lines]))
    return "\n\n".join(sections) + "\n"


def _lines(body: Sequence[ast.stmt], indent: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = ", ".join(ast.unparse(base) for base in [*node.bases])
            keywords = ", ".join(
                f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords
            )
            yield f"{indent}class {node.name}({', '.join(filter(None, [bases, keywords]))})"
            yield from _lines(node.body, indent + "    ")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            not node.name.startswith("_") or node.name == "__init__"
        ):
            word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            yield f"{indent}{word} {node.name}({ast.unparse(node.args)}){returns}"
        elif isinstance(node, ast.AnnAssign):
            yield f"{indent}{ast.unparse(node)}"
        elif isinstance(node, ast.Assign) and not indent:
            yield ast.unparse(node)


PAGES = {SNAPSHOT: lambda before: snapshot()}
