"""Limits on the size of files, functions and classes, and of core as a whole.

Sizes are counted in statements, which no formatting can change. A limit on lines rewards packing.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from members import (
    CORE,
    ROOT,
    Member,
    core_members,
    is_documentation,
    members,
    num_statements,
    text_of,
    tree_of,
)

CEILINGS = {
    ".": 310,
    "cli": 345,
    "config": 750,
    "data": 825,
    "engine": 2200,
    "engine/boundary": 695,
    "engine/grammar": 470,
    "engine/kv": 865,
    "engine/metrics": 275,
    "front": 1930,
    "interfaces": 1525,
    "layers": 1180,
    "ops": 455,
    "plan": 995,
    "plugins": 1300,
    "worker": 3435,
}
"""Folder of core/pegboard/pegboard → the most statements it may have. PAGE says why. A ceiling
changes only together with that page, which says what left, or why nothing could."""
PAGE = ROOT / "docs/decisions/2026-11-26-second-wing.md"

MAX_CORE_FILE = 250
LONG_CORE_FILES = {"worker/step_inputs.py"}
"""The files of core/pegboard/pegboard that are still longer."""
MAX_FILE = 400
MAX_FUNCTION = 70
MAX_METHODS = 25
LARGE_CLASSES: set[str] = set()
"""The classes of core/pegboard/pegboard that still have more methods."""
FILES_WITH_STUBS = {
    "core/testing/pegboard_testing/contract_command.py",  # what the author of a test must say
    "plugins/model/dense/pegboard_model_dense/decoder.py",
}
OUTSIDE_THE_ENGINE = {"self._socket.linger", "self.parent.num_waiting_children"}
"""A socket of zmq, and a field of another request."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FORBIDDEN_FILES = {"utils.py", "helpers.py", "common.py", "misc.py"}
FORBIDDEN_SUFFIXES = (
    "Manager",
    "Helper",
    "Util",
    "Handler",
    "Wrapper",
    "Mixin",
    "Base",
    "Impl",
    "Info",
    "Data",
    "Context",
    "Legacy",
)


def sizes(member: Member) -> dict[str, list[int]]:
    """Folder of a distribution → the statements of each of its files."""
    root = member.folder / member.module
    folders: dict[str, list[int]] = {}
    for path in member.sources():
        count = num_statements(tree_of(path))
        folders.setdefault(str(path.parent.relative_to(root)), []).append(count)
    return dict(sorted(folders.items()))


def table(member: Member) -> list[str]:
    """Lists the statements and files of every folder of a distribution, and their sums."""
    folders = sizes(member)
    rows = [f"{sum(each):7,} {len(each):4} {folder}" for folder, each in folders.items()]
    everything = [count for counts in folders.values() for count in counts]
    return [f"{sum(everything):7,} {len(everything):4} {member.module}", *rows]


def test_no_folder_of_core_is_over_its_ceiling() -> None:
    """Prints the table when the test fails, and with `pytest -s`."""
    lines = (line for member in core_members() for line in table(member))
    print("\n stmts files folder", *lines, sep="\n")
    core = next(member for member in core_members() if member.module == "pegboard")
    counts = {folder: sum(each) for folder, each in sizes(core).items()}
    assert counts.keys() == CEILINGS.keys()
    high = {name: count for name, count in counts.items() if count > CEILINGS[name]}
    assert not high, f"statements over the ceiling: {high}; the ceilings are {CEILINGS}"


def test_the_page_has_the_ceilings() -> None:
    rows = [
        *(f"| `{folder}` | {ceiling:,} |" for folder, ceiling in CEILINGS.items()),
        f"| all | {sum(CEILINGS.values()):,} |",
    ]
    missing = [row for row in rows if row not in PAGE.read_text("utf-8")]
    assert not missing, missing


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(CORE)) for path in CORE.rglob("*.py") if size(path) > MAX_CORE_FILE
    }
    assert long == LONG_CORE_FILES
    others = {
        str(path.relative_to(ROOT)): size(path)
        for member in members()
        for path in [*member.sources(), *(member.folder / "tests").rglob("*.py")]
        if size(path) > MAX_FILE
    }
    assert not others, others


def size(path: Path) -> int:
    return num_statements(tree_of(path))


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": count
        for member in members()
        for path in member.sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, FUNCTIONS) and (count := num_statements(node)) > MAX_FUNCTION
    }
    assert not long, long


def test_classes_of_core_have_few_methods() -> None:
    large = {
        node.name
        for path in CORE.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(part, FUNCTIONS) for part in node.body) > MAX_METHODS
    }
    assert large == LARGE_CLASSES


def test_no_method_waits_for_a_subclass() -> None:
    """A method that only raises NotImplementedError makes its class a mixin. It should take a
    collaborator instead."""
    stubs = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for member in members()
        for path in member.sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, FUNCTIONS) and is_stub(node)
    }
    assert {stub.partition(":")[0] for stub in stubs} <= FILES_WITH_STUBS, stubs


def is_stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    code = [part for part in function.body if not is_documentation(part)]
    return (
        len(code) == 1
        and isinstance(code[0], ast.Raise)
        and isinstance(code[0].exc, ast.Name | ast.Call)
        and ast.unparse(code[0].exc).startswith("NotImplementedError")
    )


def test_an_object_of_the_engine_assigns_its_own_state() -> None:
    """`self._other.name = …` belongs to a method of the other class. `Request` is data: its fields
    are assigned by those who work on it."""
    foreign = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in (CORE / "engine").rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Attribute)
        and ast.unparse(root(node)) == "self"
        and ast.unparse(node) not in OUTSIDE_THE_ENGINE
    ]
    assert not foreign, foreign


def test_one_assignment_a_line() -> None:
    """`a, b = b, a` exchanges values; `a, b = 1, 2` only saves a line."""
    packed = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for member in members()
        for path in member.sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assign) and is_packed(node)
    ]
    assert not packed, packed


def is_packed(node: ast.Assign) -> bool:
    """Whether the assignments could be made one after the other: no value reads an earlier
    target."""
    target = node.targets[0]
    value = node.value
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)):
        return False
    if any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts)):
        return False
    names = [{ast.unparse(part), ast.unparse(root(part))} for part in target.elts]
    reads = [{ast.unparse(part) for part in ast.walk(each)} for each in value.elts]
    return not any(
        names[i] & reads[k] for k in range(len(reads)) for i in range(min(k, len(names)))
    )


def root(node: ast.expr) -> ast.expr:
    """Return `a` of `a.b[0]`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node


def test_no_grab_bags() -> None:
    bad = [
        path for member in members() for path in member.sources() if path.name in FORBIDDEN_FILES
    ]
    assert not bad, bad


def test_class_names_say_what_a_thing_is() -> None:
    pattern = re.compile(rf"^class (\w+(?:{'|'.join(FORBIDDEN_SUFFIXES)}))\b", re.M)
    bad = [
        (path.name, name)
        for member in members()
        for path in member.sources()
        for name in pattern.findall(text_of(path))
    ]
    assert not bad, bad


def test_nothing_tells_where_it_was_written() -> None:
    """Tracked files must not contain an absolute path of a developer's machine."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    pattern = re.compile(r"(?<![\w.])/(?:work|home|root|Users)/\w")
    bad = []
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".json", ""} and path.is_file():
            bad += [
                f"{name}: {line.strip()}"
                for line in path.read_text("utf-8", "ignore").splitlines()
                if pattern.search(line)
            ]
    assert not bad, bad
