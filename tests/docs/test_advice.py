"""Every command, flag and package exists that is named by a message, by a comment of a data file,
or by a docstring of the product."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from pages import PROJECTS, ROOT

from pegboard.cli.flags import FlagParser
from pegboard.cli.main import OWN, command_setup
from pegboard.interfaces import KINDS
from pegboard.plugins.registry import Registry

GAP = "\N{REPLACEMENT CHARACTER}"
"""Stands for the value that an f-string fills in."""

SOURCES = [
    path for project in PROJECTS for path in sorted(project.parent.glob("pegboard*/**/*.py"))
]
DATA = [path for project in PROJECTS for path in sorted(project.parent.glob("pegboard*/**/*.toml"))]

ACTIONS = {
    "plugins": {
        "list",
        "add",
        "show",
        "why",
        "doctor",
        "lock",
        "diff",
        "sync",
        "cost",
        "new",
        "test",
        "compat",
        "record",
        "replay",
    },
    "bench": {"sweep", "latency", "throughput", "serve", "startup"},
}
"""Commands that are followed by a second word."""

FOREIGN = {
    **dict.fromkeys(
        ("--find-links", "--index-url", "--no-index", "--disable-pip-version-check", "--no-deps"),
        "pip",
    ),
    **dict.fromkeys(
        ("--no-input", "--only-binary", "--progress-bar", "--retries", "--force-reinstall"), "pip"
    ),
    **dict.fromkeys(("--cpunodebind", "--membind"), "numactl"),
    "--cpu-list": "taskset",
    "--shadow": "of pegboard vllm-compat, which reads it before the words of a script",
    "--group-add": "docker",
    "--import-mode": "pytest",
    "--param": "gcc",
    **dict.fromkeys(("--flag", "--no-flag"), "stand for any flag"),
    "--no-such-flag-of-pegboard": "must not exist",
}
"""Flags of other programs → the name of the program."""

PROSE = {"import", "has", "is", "serves"}
"""Words that may follow "pegboard" where it is the name of the package."""


def texts(path: Path) -> Iterator[str]:
    """Yields the strings of a source file. An f-string has a gap for each value. Of a data file,
    yields the whole text with its comments."""
    if path.suffix != ".py":
        yield path.read_text("utf-8")
        return
    parts: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):  # parents first
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values
            )
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        ):
            yield node.value


def findings(pattern: str, wrong: Callable[[re.Match[str]], bool]) -> list[str]:
    return sorted(
        {
            f"{path.relative_to(ROOT)}: {' '.join(match[0].split())}"
            for path in [*SOURCES, *DATA]
            for text in texts(path)
            for match in re.finditer(pattern, text)
            if wrong(match)
        }
    )


@cache
def flags() -> frozenset[str]:
    """Returns every flag of every command: those of the settings, and those that the sources
    declare."""
    parser = FlagParser(prog="pegboard word")
    parser.add_settings("server", "engine", "plugins")
    declared = {
        argument.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    return frozenset({*parser.flags, *declared, "--help", "--version"})


def words() -> set[str]:
    return {*OWN, *Registry.discover().names("command")}


def declared_words() -> set[str]:
    """Returns the commands of all packages, also of examples that are not installed."""
    projects = [tomllib.loads(path.read_text("utf-8"))["project"] for path in PROJECTS]
    return {
        name
        for project in projects
        for name in project.get("entry-points", {}).get("pegboard.command.v1", ())
    }


def test_commands_exist() -> None:
    """`pegboard plugins` and `pegboard bench` alone are not commands, because they need one more
    word."""
    known = words() | declared_words()

    def wrong(match: re.Match[str]) -> bool:
        word = match[1]
        more = match[2]
        if word == GAP or word in PROSE:
            return False
        needs_more = (
            word in ACTIONS and match.string.strip() != match[0].strip()
        )  # a text that is only a command is a parser's `prog`
        return word not in known or (
            needs_more and more not in (*ACTIONS[word], GAP, "WHAT", "WORD", "…", "--help")
        )

    found = findings(
        rf"(?<![\w/.\[-])pegboard ([a-z{GAP}][a-z-]*)[ \n]?((?<=[ \n])[\w{GAP}…-]+)?", wrong
    )
    assert not found, "\n".join(found)


def test_flags_exist() -> None:
    """A flag with dots is an option of a plugin. Its kind must exist."""

    def wrong(match: re.Match[str]) -> bool:
        name = match[0].rstrip(".-").replace("_", "-")
        if "." in name:
            kind = name.removeprefix("--").partition(".")[0]
            return (
                kind not in ("kind", "setting")
                and kind.replace("-", "_") not in KINDS
                and f"--{kind}" not in flags()
            )
        return name not in flags() and name not in FOREIGN

    found = findings(rf"(?<![\w-])--[a-z](?:[\w.-]*\w)?(?![\w.-]*{GAP})", wrong)
    assert not found, "\n".join(found)


def test_packages_exist() -> None:
    """`pip install` names a distribution of this repository, or a requirement of one of them."""
    projects = [tomllib.loads(path.read_text("utf-8"))["project"] for path in PROJECTS]
    required = [text for project in projects for text in project.get("dependencies", ())]
    required += [
        text
        for project in projects
        for extra in project.get("optional-dependencies", {}).values()
        for text in extra
    ]
    known = {project["name"] for project in projects} | {
        re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in required
    }

    def wrong(match: re.Match[str]) -> bool:
        return GAP not in match[1] and match[1] not in known

    found = findings(rf"pip install ['\"]?([\w.{GAP}-]*[\w{GAP}])", wrong)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", sorted(words() - set(OWN)))
def test_every_command_can_be_asked_for_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    registry = Registry.discover()
    try:
        status = registry.build(registry.find("command", word), command_setup(word)).run(["--help"])
    except SystemExit as ended:
        status = ended.code or 0
    assert (
        status == 0
        and f"usage: pegboard {word.replace('plugins-', 'plugins ')}" in capsys.readouterr().out
    )
