"""Core must not spell the name of a plugin, device family, file ending or model family. It reads
such names from the plugins' data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from members import CORE, ROOT, plugins, tree_of

WORDS = {
    "*": "every plugin, in allow lists",
    "none": "a word of requests and settings: nothing",
    "pooling": "a runner: the engine makes vectors",
    "priority": "a field of requests",
    "torch": "the library, where its version or its presence is reported",
}
"""Plugin names that mean something else in core → their meaning there. `test_choices_are_data`
finds code that chooses a plugin by such a name."""
EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(file, word) pairs that stay → the reason."""

DEVICES = re.compile(
    r"(?<![\w-])(cpu|cuda|rocm|hip|xpu|tpu|hpu|npu|mps|metal|x86|arm64|amx|avx|neon)(?![a-z])"
    r"(?!_flags|_offload)",  # the last one is in the name of a setting of vLLM
    re.I,
)
ENDINGS = re.compile(r"\.(gguf|safetensors|bin|pt|pth|ckpt|onnx|model|tekken|jinja)\b(?!\.)")
ORDINARY_FAMILIES = {"openai", "step", "seed", "pythonic"}
"""Folders of plugins/family whose names are also ordinary words, or the name of a vendor whose
protocol is meant."""


def families() -> re.Pattern[str]:
    """A pattern that matches the vendors below plugins/family."""
    names = {
        path.parent.name for path in ROOT.glob("plugins/family/*/pyproject.toml")
    } - ORDINARY_FAMILIES
    return re.compile(rf"\b({'|'.join(sorted(names))})\d*\b", re.I)


def strings(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the string constants that are not docstrings, with their lines."""
    tree = tree_of(path)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value, node.lineno


def core_sources() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


def spelled(text: str, names: set[str], vendors: re.Pattern[str]) -> set[str]:
    """Returns the words of a text that core must not spell."""
    found = {text} & names
    for pattern in (DEVICES, vendors):
        found |= {match.group(1).lower() for match in pattern.finditer(text)}
    return found | {f".{match.group(1)}" for match in ENDINGS.finditer(text)}


@cache
def spelled_words() -> dict[tuple[str, str], int]:
    """(file, word) → a line where the word occurs."""
    names = {name for member in plugins() for _, name, _ in member.entry_points} - set(WORDS)
    names |= {member.name for member in plugins()}
    vendors = families()
    return {
        (str(path.relative_to(CORE)), word): line
        for path in core_sources()
        for text, line in strings(path)
        for word in spelled(text, names, vendors)
    }


def test_core_spells_no_plugin_device_file_or_family() -> None:
    places = spelled_words()
    wrong = [
        f"{key[0]}:{places[key]} spells {key[1]!r}" for key in sorted(set(places) - set(EXCEPTIONS))
    ]
    assert not wrong, "\n".join(wrong)


def test_lists_hold_what_is_so() -> None:
    """Entries that no longer occur must be removed, so that the list only shrinks."""
    gone = set(EXCEPTIONS) - set(spelled_words())
    assert not gone, f"no longer so, remove from the lists: {sorted(gone)}"


def test_what_is_found() -> None:
    vendors = families()
    assert spelled("runs on CUDA", set(), vendors) == {"cuda"}
    assert spelled("model.gguf", set(), vendors) == {".gguf"}
    assert spelled("Qwen3 writes it so", set(), vendors) == {"qwen"}
    assert spelled("paged", {"paged"}, vendors) == {"paged"}
    assert spelled("num_cpus", set(), vendors) == set()


def literal_choices(tree: ast.AST) -> Iterator[int]:
    """Yields the lines where a plugin is looked up by a literal name."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        values = [keyword.value for keyword in node.keywords if keyword.arg == "explicit"]
        if node.func.attr == "find":
            values += node.args[1:2]
        yield from (
            value.lineno
            for value in values
            if isinstance(value, ast.Constant) and isinstance(value.value, str)
        )


def test_choices_are_data() -> None:
    """`find(kind, "name")`, `choose(…, explicit="name")` and similar calls never get a literal
    name."""
    sources = {path: tree_of(path) for path in core_sources()}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in sources.items()
        for line in literal_choices(tree)
    ]
    assert not wrong, "\n".join(wrong)
