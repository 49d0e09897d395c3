"""Installations without `pip install`: a thin layer with our unpacked wheels, over links to exactly
the third-party packages that those wheels declare. A child interpreter sees only the standard
library, the layer and the links. Therefore a missing entry in `dependencies` shows, and so does a
missing plugin."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120


def wheels_in(folder: Path) -> dict[str, Path]:
    """Distribution name → its wheel in the folder of a release."""
    return {
        wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in sorted(folder.glob("*.whl"))
    }


@dataclass(frozen=True)
class Installation:
    """Folders for sys.path, with our folder first."""

    path: tuple[Path, ...]

    def command(self, code: str) -> list[str]:
        setup = (
            f"import sys; sys.path[:0] = {[str(folder) for folder in self.path]!r}; sys.argv[0] = "
            "'test'\n"
        )
        return [sys.executable, "-I", "-S", "-X", "utf8", "-c", setup + code]

    def run(self, code: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run `code` in a new interpreter."""
        return subprocess.run(
            self.command(code), capture_output=True, text=True, timeout=TIMEOUT_S, cwd=cwd
        )

    def output(self, code: str, cwd: Path | None = None) -> str:
        """Returns the stdout of `code`, which must succeed."""
        result = self.run(code, cwd)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.strip()

    def pegboard(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command `pegboard`."""
        return self.run(f"from pegboard.cli.main import main; sys.exit(main({list(arguments)!r}))")


class Layers:
    """Makes installations. Wheels are unpacked and packages are linked once per set."""

    def __init__(self, wheels: dict[str, Path], folder: Path) -> None:
        self.wheels = wheels
        self.folder = folder
        self.made: dict[tuple[str, ...], Installation] = {}

    def with_required(self, names: Iterable[str]) -> set[str]:
        """Returns our distributions `names`, those of our distributions that they require, and
        core: everything that pip would install."""
        found: set[str] = set()
        waiting = ["pegboard", *names]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += [
                    one.name
                    for one in self.requirements(name)
                    if one.name in self.wheels and one.marker is None
                ]
        return found

    def requirements(self, name: str) -> list[Requirement]:
        """Returns the requirements of one of our distributions, from its wheel."""
        with zipfile.ZipFile(self.wheels[name]) as wheel:
            (file,) = (inner for inner in wheel.namelist() if inner.endswith(".dist-info/METADATA"))
            lines = wheel.read(file).decode().splitlines()
        return [
            Requirement(line.partition(": ")[2])
            for line in lines
            if line.startswith("Requires-Dist: ")
        ]

    def with_plugins(self) -> set[str]:
        """Returns our distributions that register plugins."""
        found = set()
        for name, path in self.wheels.items():
            with zipfile.ZipFile(path) as wheel:
                points = [
                    wheel.read(inner).decode()
                    for inner in wheel.namelist()
                    if inner.endswith("entry_points.txt")
                ]
            if any("[pegboard." in text for text in points):
                found.add(name)
        return found

    def of(self, names: Iterable[str], *more: str) -> Installation:
        """Install our distributions `names`, those of our distributions that they require, and the
        third-party requirements `more`."""
        key = (*sorted(self.with_required(names)), *more)
        if key not in self.made:
            place = self.folder / str(len(self.made))
            own = place / "own"
            third = place / "third_party"
            third.mkdir(parents=True)
            for name in key[: len(key) - len(more)]:
                with zipfile.ZipFile(self.wheels[name]) as wheel:
                    wheel.extractall(own)
            found = [Distribution.at(info) for info in own.glob("*.dist-info")]
            wanted = [requirement for dist in found for requirement in dist.requires or ()]
            link(third, [*wanted, *more], {dist.name: dist for dist in found})
            self.made[key] = Installation((own, third))
        return self.made[key]


def link(folder: Path, requirements: Sequence[str], own: dict[str, Distribution]) -> None:
    """Link the packages that `requirements` need, and their own requirements, into `folder`."""
    waiting = [(Requirement(text), "") for text in requirements]
    seen = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if (requirement.name, tuple(sorted(requirement.extras))) in seen:
            continue
        seen.add((requirement.name, tuple(sorted(requirement.extras))))
        ours = own.get(requirement.name)
        try:
            found = ours or distribution(requirement.name)
        except PackageNotFoundError:
            continue  # optional on this platform; code that needs it will fail with an error
        for wanted in ("", *requirement.extras):
            waiting += [(Requirement(text), wanted) for text in found.requires or ()]
        if ours is None:
            link_distribution(folder, found)


def link_distribution(folder: Path, found: Distribution) -> None:
    for top in {Path(file).parts[0] for file in found.files or ()}:
        source = Path(str(found.locate_file(top)))
        target = folder / top
        if top not in ("..", "__pycache__") and source.exists() and not target.exists():
            target.symlink_to(source)
