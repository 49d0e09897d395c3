"""What users may write is used: every flag of a command and every field of a request body has code
that reads it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from declarations import product_files, strings_of, uses
from members import ROOT, tree_of

IGNORED = {
    "user": "OpenAI's bookkeeping",
    "metadata": "OpenAI's bookkeeping",
    "safety_identifier": "OpenAI's bookkeeping",
    "prompt_cache_key": "OpenAI's bookkeeping",
    "cache_control": "a hint about caching; the prefix cache needs none",
    "context_management": "it asks for a shorter prompt where one is too long",
    "service_tier": "only values that change nothing are accepted",
    "store": "only false is accepted by completions",
    "truncation": "an input that is too long is refused; OpenAI's default",
    "summary": "only auto and null are accepted: the reasoning is shown whole",
    "generate_summary": "the older name of summary",
    "verbosity": "only medium, the default, is accepted",
    "include_obfuscation": "only false is accepted",
    "budget_tokens": "Anthropic's clients must send it; docs say that it is not enforced",
    "display": "only the default is accepted",
}
"""Fields of request bodies that change nothing, on purpose → why they are accepted."""


def flags() -> Iterator[tuple[Path, str]]:
    """Yields (file, destination) of every flag that product code declares with a plain name."""
    for path in product_files():
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                names = [
                    arg.value
                    for arg in node.args
                    if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                ]
                dest = next(
                    (
                        word.value.value
                        for word in node.keywords
                        if word.arg == "dest" and isinstance(word.value, ast.Constant)
                    ),
                    "",
                )
                long = next(
                    (name for name in names if name.startswith("--")), names[0] if names else ""
                )
                if dest or long:
                    yield path, str(dest) or long.lstrip("-").replace("-", "_")


def body_fields() -> Iterator[tuple[Path, str, str]]:
    """Yields (file, class, field) of every pydantic model of a request body."""
    known = {"Fields", "BaseModel"}
    classes = [
        (path, node)
        for path in product_files()
        if path.name in ("fields.py", "sampling_fields.py", "tokenize.py")
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef)
    ]
    for _ in range(4):  # subclasses of subclasses
        known |= {
            node.name
            for _, node in classes
            if any(ast.unparse(base) in known for base in node.bases)
        }
    for path, node in classes:
        if node.name in known:
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield path, node.name, line.target.id


def test_every_flag_of_a_command_is_read() -> None:
    unread = [
        f"{path.relative_to(ROOT)}: {dest}"
        for path, dest in flags()
        if not any(
            dest in uses(other).read or dest in strings_of(other)
            for other in path.parent.glob("*.py")
        )
    ]
    assert not unread, f"flags that nothing reads: {', '.join(unread)}"


def test_every_field_of_a_body_is_read_or_ignored_for_a_reason() -> None:
    found = list(body_fields())
    assert len(found) > 80, "where are the request bodies?"
    unread = []
    for path, owner, field in found:
        near = [
            other
            for other in product_files()
            if other.parent == path.parent
            or other.parent.parent == ROOT / "core/chat"
            or other == ROOT / "core/server/pegboard_server/pooling.py"  # what such routes share
        ]
        if path.name == "sampling_fields.py":  # its readers are the APIs
            near = [
                other
                for other in product_files()
                if "/api/" in str(other) or "pegboard_chat" in str(other)
            ]
        if field not in IGNORED and not any(
            field in uses(other).read or field in strings_of(other) for other in near
        ):
            unread.append(f"{owner}.{field}")
    assert not unread, f"accepted and read by nothing: {', '.join(unread)}"


def test_ignored_fields_exist() -> None:
    assert set(IGNORED) <= {field for _, _, field in body_fields()}
