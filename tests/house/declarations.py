"""Finds what core declares (fields, flags, methods, actions) and which code reads it. It searches
the sources by name.

A name is searched only in folders that mention its class, so that `rows` of one class does not
count as read when the code reads `rows` of another. The sources are all product code, without
tests. pegboard_testing counts only for kinds without a plugin in this repository: for them, a fake
is the only implementation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from members import CORE, members, text_of, tree_of

from pegboard.interfaces import KINDS

DECLARING = (
    *sorted((CORE / "interfaces").glob("*.py")),
    *(CORE / "data" / name for name in ("batch.py", "request.py")),
    CORE / "config/limits.py",
    CORE / "config/schema.py",
    CORE.parents[1] / "server/pegboard_server/settings.py",
)
"""The files whose classes are checked."""
SUFFIXES = ("Spec", "Need", "Setup", "Config", "Limits")
NAMES = {
    "Batch",
    "NewRequest",
    "StepOutput",
    "BlockDelta",
    "TransferReport",
    "StepTimes",
    "Checkpoint",
    "EngineRequest",
    "RequestDelta",
    "AttentionInputs",
    "AttentionLayer",
    "SampleStep",
    "Sampled",
    "DraftStep",
    "Drafts",
}
CARRIERS = {
    "EngineConfig": ("Settings", "EnginePlan", "WorkerPlan"),
    "ServerConfig": ("Settings", "ApiSetup", "Chats"),
    "PluginConfig": ("Settings",),
    "StructuredOutputsConfig": ("EngineConfig", "EnginePlan"),
    "BlockDelta": ("Batch",),
    "TokenizerSpec": ("TokenizerNeed",),
    "StepTimes": ("StepOutput",),
    "TransferReport": ("KVConnectorWorker",),
}
"""Class → other classes that lead to it. A folder that mentions one of those may read the class
without naming it."""


@dataclass(frozen=True)
class Field:
    """One declared field. has_default: the constructor does not require it. position: its place in
    the constructor."""

    owner: str
    name: str
    file: Path
    has_default: bool
    position: int

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


@cache
def all_files() -> list[Path]:
    return [path for member in members() for path in member.sources()]


@cache
def product_files() -> list[Path]:
    return [
        path
        for member in members()
        if member.name != "pegboard-testing"
        for path in member.sources()
    ]


@cache
def fields() -> list[Field]:
    """The fields of every Spec, Need, Setup and settings class, of the limits, and of the messages
    between engine and workers."""
    found = []
    for file in DECLARING:
        for node in tree_of(file).body if file.exists() else ():
            if not isinstance(node, ast.ClassDef) or any(
                "Protocol" in ast.unparse(base) for base in node.bases
            ):
                continue
            if node.name in NAMES or node.name.endswith(SUFFIXES):
                lines = [
                    line
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                ]
                found += [
                    Field(node.name, line.target.id, file, line.value is not None, position)  # type: ignore[union-attr]
                    for position, line in enumerate(lines)
                    if "ClassVar" not in ast.unparse(line.annotation)
                ]
    return found


@cache
def words_of(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text_of(path)))


@cache
def filled_kinds() -> frozenset[str]:
    """The kinds that have a plugin in this repository."""
    return frozenset(kind for member in members() for kind, _, _ in member.entry_points)


@cache
def places(owner: str, file: Path) -> list[Path]:
    """The files in folders that mention a class, which is declared in `file`."""
    is_fake = (
        file.parent.name == "interfaces" and file.stem in KINDS and file.stem not in filled_kinds()
    )
    files = all_files() if is_fake else product_files()
    if owner in ("Spec", "Need"):
        return files
    meant = {owner, *CARRIERS.get(owner, ())}
    folders = {path.parent for path in files if words_of(path) & meant}
    return [path for path in files if path.parent in folders]


@dataclass(frozen=True)
class Uses:
    """How one file uses names. read: attributes that are loaded, and keys that are looked up.
    written: attributes that are stored, and keywords of calls. given: (callee, number of positional
    arguments) of calls."""

    read: frozenset[str]
    written: frozenset[str]
    given: frozenset[tuple[str, int]]


LOOKUPS = {"getattr", "get", "attrgetter", "hasattr"}


@cache
def uses(path: Path) -> Uses:
    read: set[str] = set()
    written: set[str] = set()
    given: set[tuple[str, int]] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            (read if isinstance(node.ctx, ast.Load) else written).add(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            read.add(str(node.slice.value))
        elif isinstance(node, ast.MatchClass):
            read.update(node.kwd_attrs)
        elif isinstance(node, ast.Call):
            callee = ast.unparse(node.func).rpartition(".")[2]
            written.update(keyword.arg for keyword in node.keywords if keyword.arg)
            given.add((callee, len(node.args)))
            if callee in LOOKUPS:
                read.update(str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))
    return Uses(frozenset(read), frozenset(written), frozenset(given))


def is_read(field: Field) -> bool:
    """True if a file other than the field's own reads it."""
    # selection compares all fields of a need; a field that no code sets is dead
    if field.owner.endswith("Need"):
        return is_set(field)
    return any(
        field.name in uses(path).read
        for path in places(field.owner, field.file)
        if path != field.file
    )


def is_set(field: Field) -> bool:
    """True if some code gives the field a value, at least when an object is made."""
    (own,) = (
        node
        for node in tree_of(field.file).body
        if isinstance(node, ast.ClassDef) and node.name == field.owner
    )
    calls = [
        node
        for node in ast.walk(own)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cls"
    ]
    if any(
        len(call.args) > field.position or field.name in {one.arg for one in call.keywords}
        for call in calls
    ):
        return True  # a class method makes the object
    for path in places(field.owner, field.file):
        if path == field.file:
            continue
        positional = any(
            name == field.owner and count > field.position for name, count in uses(path).given
        )
        if positional or field.name in uses(path).written:
            return True
    return False


# --- flags, methods, actions ----------------------------------------------------------------------


def flag_words() -> Iterator[tuple[str, str]]:
    """Yields (spec class, word) for every flag that a spec may have: the closed list of its
    kind."""
    for kind in KINDS.values():
        module, _, name = kind.spec.partition(":")
        yield from ((name, word) for word in sorted(getattr(import_module(module), name).FLAGS))


@cache
def text_constants() -> dict[str, str]:
    """NAME → "text" for every constant of the product code that is a string."""
    found = {}
    for path in product_files():
        for node in tree_of(path).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.targets[0], ast.Name)
            ):
                found[node.targets[0].id] = str(node.value.value)
    return found


@cache
def flags_read() -> frozenset[str]:
    """The words that product code looks for among the flags of a spec."""
    found: set[str] = set()
    for path in product_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                if "flags" in ast.unparse(node.comparators[0]):
                    found.add(_text(node.left))
            elif (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.BitAnd)
                and "flags" in ast.unparse(node)
            ):
                found.update(
                    _text(part) for part in ast.walk(node) if isinstance(part, ast.Constant)
                )
    return frozenset(found)


def _text(node: ast.expr) -> str:
    """The value of a constant, also when the code uses its name."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    name = ast.unparse(node).rpartition(".")[2]
    return text_constants().get(name, name)


def public_methods(file: Path, owner: str) -> list[str]:
    (node,) = (
        node for node in tree_of(file).body if isinstance(node, ast.ClassDef) and node.name == owner
    )
    functions = [
        line for line in node.body if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [line.name for line in functions if not line.name.startswith("_")]


@cache
def strings_of(path: Path) -> frozenset[str]:
    values = [node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)]
    return frozenset(value for value in values if isinstance(value, str))


def called_on_workers() -> Iterator[str]:
    """The methods that core names in `executor.call("method")`."""
    for path in sorted((CORE / "engine").rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("executor.call"):
                yield from (
                    str(first.value) for first in node.args[:1] if isinstance(first, ast.Constant)
                )
