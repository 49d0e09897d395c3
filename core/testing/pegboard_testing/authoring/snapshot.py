"""Writes the signatures of all interfaces as text, so that a review shows every change of the contract.

    python -m pegboard_testing.authoring.snapshot --write    after an intended change
    python -m pegboard_testing.authoring.snapshot --check    in CI

One section per kind file: its classes with fields and method signatures, and its aliases, without docstrings and bodies.
"""

from __future__ import annotations

import argparse
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
            keywords = ", ".join(f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or write the snapshot. Return the exit status: 0 = the stored snapshot is current or was written, 1 = it differs."""
    parser = argparse.ArgumentParser(description="Signatures of the interfaces.")
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true")
    choice.add_argument("--check", action="store_true")
    if parser.parse_args(arguments).write:
        SNAPSHOT.write_text(snapshot(), "utf-8")
        return 0
    return 0 if SNAPSHOT.is_file() and SNAPSHOT.read_text("utf-8") == snapshot() else 1


if __name__ == "__main__":
    raise SystemExit(main())
