"""Which tests a change touches, nearest first. `make check` runs them.

    python tests/house/changed.py [COMMIT]     print them for what differs from a commit (HEAD if
    none is named)

A test file is at distance 0 if the change contains it, at 1 if it imports a changed module, at 2 if
it imports a module that does so, and so on. It is at most at distance 2 from its own distribution.
Tests that reach a plugin only through its entry point are not seen: `make test` runs everything.
"""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from import_graph import imported_modules, module_name, modules
from members import ROOT, members

PLACES = ("core", "plugins", "kernels", "contrib", "tests", "examples")


def changed_paths(base: str) -> list[Path]:
    """The files that differ from a commit, also those that git does not know yet and those that are
    gone."""
    commands = (
        ["git", "diff", "--name-only", base],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    names = {
        name
        for words in commands
        for name in subprocess.check_output(words, cwd=ROOT, text=True).splitlines()
    }
    return sorted(ROOT / name for name in names)


def test_files() -> list[Path]:
    return sorted(
        path
        for place in PLACES
        for path in (ROOT / place).rglob("test_*.py")
        if ".venv" not in path.parts
    )


def near(changed: Iterable[Path]) -> list[tuple[int, Path]]:
    """Returns (distance, test file) for the tests that the paths touch, nearest first."""
    sources, users, tests = _graph()
    distances: dict[str | Path, int] = {}
    queue: deque[str | Path] = deque()
    for place in changed:
        for node in (place, sources.get(place)):
            if node is not None:
                distances[node] = 0
                queue.append(node)
    while queue:
        node = queue.popleft()
        for user in users.get(node, ()):
            if distances.get(user, sys.maxsize) > distances[node] + 1:
                distances[user] = distances[node] + 1
                queue.append(user)
    for test in tests:
        places = [
            1 if path not in sources else 2 for path in changed if _belong_together(test, path)
        ]
        if places:
            distances[test] = min(*places, distances.get(test, 2))
    return sorted((distances[test], test) for test in tests if test in distances)


@cache
def _graph() -> tuple[dict[Path, str], dict[str | Path, set[str | Path]], list[Path]]:
    """Returns the module of each source file, what imports a module or file, and the test files."""
    sources = {
        path: module_name(path, member.folder) for member in members() for path in member.sources()
    }
    users: dict[str | Path, set[str | Path]] = {}
    for name, targets in modules().items():
        for target in targets:
            users.setdefault(target, set()).add(name)
    tests = test_files()
    for path in {*tests, *(helper for test in tests for helper in test.parent.glob("*.py"))}:
        for target in _imports(path, set(sources.values())):
            users.setdefault(target, set()).add(path)
    return sources, users, tests


def _imports(path: Path, known: set[str]) -> Iterator[str | Path]:
    """Yields what a file below a folder of tests imports: modules of the repository, files next to
    it, and each conftest.py."""
    for module, _, names in imported_modules(path):
        neighbor = path.parent / f"{module}.py"
        if neighbor.is_file():
            yield neighbor
        for name in (module, *(f"{module}.{name}" for name in names)):
            if name in known:
                yield name
    for folder in path.parents:
        if path != (conftest := folder / "conftest.py") and conftest.is_file():
            yield conftest
        if folder == ROOT:
            return


def _belong_together(test: Path, changed: Path) -> bool:
    """True if both are in one distribution, or if the change is a page of the docs and the test is
    one of the pages."""
    if changed.suffix == ".md":
        return test.parent == ROOT / "tests/docs"
    home = next(
        (folder for folder in changed.parents if (folder / "pyproject.toml").is_file()), ROOT
    )
    return home != ROOT and home in test.parents


if __name__ == "__main__":
    for distance, file in near(changed_paths(*(sys.argv[1:] or ["HEAD"]))):
        print(distance, file.relative_to(ROOT))
