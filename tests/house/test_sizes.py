"""Files and functions fit in a head."""

from __future__ import annotations

import ast
import re
import subprocess

from members import ROOT, members

MAX_LINES = 500
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


def test_no_file_is_over_500_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for member in members()
        for path in [*member.sources(), *(member.folder / "tests").rglob("*.py")]
        if (count := len(path.read_text("utf-8").splitlines())) > MAX_LINES
    }
    assert not long, long


def test_no_function_is_over_80_lines() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": count
        for member in members()
        for path in member.sources()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (count := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long, long


def test_no_grab_bags() -> None:
    bad = [path for member in members() for path in member.sources() if path.name in FORBIDDEN_FILES]
    assert not bad, bad


def test_class_names_say_what_a_thing_is() -> None:
    pattern = re.compile(rf"^class (\w+(?:{'|'.join(FORBIDDEN_SUFFIXES)}))\b", re.M)
    bad = [
        (path.name, name)
        for member in members()
        for path in member.sources()
        for name in pattern.findall(path.read_text("utf-8"))
    ]
    assert not bad, bad


def test_nothing_tells_where_it_was_written() -> None:
    """No absolute path of a developer's machine in a tracked file."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    pattern = re.compile(r"(?<![\w.])/(?:work|home|root|Users)/\w")
    bad = []
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".json", ""} and path.is_file():
            bad += [f"{name}: {line.strip()}" for line in path.read_text("utf-8", "ignore").splitlines() if pattern.search(line)]
    assert not bad, bad
