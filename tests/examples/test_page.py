"""docs/examples.md lists every script, with what its first sentence says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs/examples.md"
FOLDERS = ("disaggregated_prefill", "offline", "online")
ROW = re.compile(r"\| .+ \| \[(.+)\]\(\.\./examples/(.+)\) \| (.+) \| (.+) \|$", re.M)


def rows() -> list[tuple[str, str, str, str]]:
    """Return the shown name, the path, the sentence and the tests of each script."""
    return ROW.findall(PAGE.read_text("utf-8"))


def summary_of(path: Path) -> str:
    """Return the beginning of a script's docstring, in one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring, f"{path} needs a docstring"
    return " ".join(docstring.split("\n\n")[0].split())


def test_every_row_names_a_script_and_says_what_it_does() -> None:
    for name, path, sentence, tests in rows():
        assert name == path and (EXAMPLES / path).is_file(), f"there is no examples/{path}"
        assert summary_of(EXAMPLES / path).startswith(sentence[:-1]), f"{path}: {sentence}"
        assert tests


def test_every_script_is_in_the_page_once() -> None:
    paths = [path for _, path, _, _ in rows()]
    scripts = [
        str(path.relative_to(EXAMPLES))
        for folder in FOLDERS
        for path in sorted((EXAMPLES / folder).glob("*.py"))
    ]
    assert sorted(path for path in paths if "/" in path) == scripts
    assert len(set(paths)) == len(paths)


def test_every_script_says_how_to_run_it_and_is_short() -> None:
    for folder in FOLDERS:
        for path in (EXAMPLES / folder).glob("*.py"):
            text = path.read_text("utf-8")
            assert f" examples/{folder}/{path.name}" in text.split('"""')[1], path
            assert '\nif __name__ == "__main__":\n' in text, path
            assert len(text.splitlines()) <= 90, f"{path} should have one idea"
