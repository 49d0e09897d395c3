"""Limits on the size of files and functions, and of core as a whole."""

from __future__ import annotations

import ast
import re
import subprocess

from members import CORE, ROOT, Member, code_lines, core_members, members, text_of, tree_of

MAX_CODE_LINES = 13_800
"""The limit of code lines of core/pegboard/pegboard, without blank lines, comments and docstrings
(why: docs/decisions/2026-11-22-the-house.md)."""
MAX_LINES = 500
AIMED_CODE_LINES = 300
NUM_LONG_FILES = 1
"""The number of files of core/pegboard/pegboard that are longer than the aim."""
MAX_FUNCTION_LINES = 80
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


def table(member: Member) -> list[str]:
    """Lists the code lines and files of every folder of a distribution, and their sums."""
    root = member.folder / member.module
    folders: dict[str, list[int]] = {}
    for path in member.sources():
        folders.setdefault(str(path.parent.relative_to(root)), []).append(code_lines(path))
    rows = [
        f"{sum(counts):7,} {len(counts):4} {folder}" for folder, counts in sorted(folders.items())
    ]
    everything = [count for counts in folders.values() for count in counts]
    return [f"{sum(everything):7,} {len(everything):4} {member.module}", *rows]


def test_core_is_small() -> None:
    """Prints the table when the test fails, and with `pytest -s`."""
    print(
        "\n code files folder",
        *(line for member in core_members() for line in table(member)),
        sep="\n",
    )
    count = sum(map(code_lines, CORE.rglob("*.py")))
    assert count <= MAX_CODE_LINES, (
        f"core/pegboard has {count:,} code lines, the limit is {MAX_CODE_LINES:,}"
    )


def test_files_of_core_aim_at_300_code_lines() -> None:
    long = {
        str(path.relative_to(CORE)): count
        for path in CORE.rglob("*.py")
        if (count := code_lines(path)) > AIMED_CODE_LINES
    }
    assert len(long) <= NUM_LONG_FILES, long


def test_no_file_is_over_500_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for member in members()
        for path in [*member.sources(), *(member.folder / "tests").rglob("*.py")]
        if (count := len(text_of(path).splitlines())) > MAX_LINES
    }
    assert not long, long


def test_no_function_is_over_80_lines() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": count
        for member in members()
        for path in member.sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (count := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long, long


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
