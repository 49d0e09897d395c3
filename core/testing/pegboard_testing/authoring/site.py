"""Builds the documentation as a site, with MkDocs.

python -m pegboard_testing.authoring.site OUTPUT    what `make site` calls

The pages link to each other and to files of the repository. Here they are copied to one folder, and
each link is changed to the copy: of a page, of a package's README, of a file, or to a list of a
folder. So the site is whole without the network, wherever it lies. `mkdocs.yml` has the look and
the order of the guides; the lists of kinds, packages and decisions are made here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pegboard.errors import ConfigError
from pegboard.interfaces import KINDS
from pegboard_testing.authoring.catalogue import REPOSITORY
from pegboard_testing.authoring.release import Source, sources

LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
PICTURES = (".png", ".svg", ".jpg")


def build(repository: Path, output: Path) -> None:
    """Build the site of a repository in the folder `output`. Raises ConfigError if a page or a link
    is wrong."""
    from mkdocs.commands.build import build as run
    from mkdocs.config import load_config
    from mkdocs.exceptions import MkDocsException

    with tempfile.TemporaryDirectory() as folder:
        pages = Pages(repository, Path(folder))
        pages.write()
        places = {"docs_dir": folder, "site_dir": str(output.resolve())}
        try:
            config: Any = load_config(str(repository / "mkdocs.yml"), **places)
            config["nav"] = [*config["nav"], *pages.sections()]
            run(config)
        except MkDocsException as error:
            raise ConfigError(f"the site was not built: {error}") from error


class Pages:
    """The pages in the form in which MkDocs reads them, in one folder."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self._repository = repository
        self._folder = folder
        self._sources = sources(repository)
        self._places = dict(self._pages())
        self._files: set[Path] = set()

    def _pages(self) -> Iterator[tuple[Path, str]]:
        """Yield each page of the repository and its path in the site."""
        repository = self._repository
        yield repository / "README.md", "index.md"
        yield repository / "CONTRIBUTING.md", "contributing.md"
        yield repository / "CHANGELOG.md", "changelog.md"
        for path in sorted((repository / "docs").rglob("*.md")):
            yield path, path.relative_to(repository / "docs").as_posix()
        for source in self._sources:
            yield source.folder / "README.md", f"packages/{source.name}.md"

    def write(self) -> None:
        """Write all pages, and the files that they link to."""
        for path, place in self._places.items():
            target = self._folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self._relinked(path, place), "utf-8")
        (self._folder / "packages.md").write_text(self._catalogue(), "utf-8")

    def _relinked(self, path: Path, place: str) -> str:
        """Return the text of a page with links to the copies. Code is left alone."""
        lines = []
        is_code = False
        for line in path.read_text("utf-8").splitlines():
            is_code ^= line.startswith("```")
            if not is_code and not line.startswith("    "):
                line = LINK.sub(lambda match: self._target(match, path, place), line)
            lines.append(line)
        return "\n".join(lines) + "\n"

    def _target(self, match: re.Match[str], path: Path, place: str) -> str:
        linked = (path.parent / match[1]).resolve()
        target = self._places.get(linked) or self._places.get(linked / "README.md")
        if target is None:
            target = self._list(linked) if linked.is_dir() else self._copy(linked)
        start = Path(place).parent
        return os.path.relpath(target, start).replace(os.sep, "/") + (match[2] or "")

    def _copy(self, path: Path) -> str:
        """Copy a file and return its place in the site. Text is shown by browsers as text."""
        relative = path.relative_to(self._repository).as_posix()
        ending = "" if path.suffix in PICTURES else ".txt"
        place = f"files/{relative}{ending}"
        target = self._folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        return place

    def _list(self, folder: Path) -> str:
        """Write a page with the files of a folder, and return its place."""
        relative = folder.relative_to(self._repository).as_posix()
        place = f"files/{relative}/index.md"
        if folder not in self._files:
            self._files.add(folder)
            files = [
                path
                for path in sorted(folder.rglob("*"))
                if path.is_file() and "__pycache__" not in path.parts
            ]
            lines = [
                f"- [{path.relative_to(folder)}]({path.relative_to(folder)}.txt)" for path in files
            ]
            for path in files:
                self._copy(path)
            (self._folder / place).write_text("\n".join([f"# {relative}", "", *lines, ""]), "utf-8")
        return place

    def _catalogue(self) -> str:
        """Return the page that lists all distributions."""
        rows = [
            f"| [`{source.name}`](packages/{source.name}.md) | {_kinds(source)} | "
            f"{source.summary} |"
            for source in self._sources
        ]
        head = ["# Packages", "", "| package | kinds | |", "|---|---|---|"]
        return "\n".join([*head, *rows, ""])

    def sections(self) -> list[dict[str, Any]]:
        """Return the parts of the navigation that are lists."""
        places = sorted(self._places.values())
        return [
            {"Kinds of plugin": ["kinds.md", *(f"kinds/{name}.md" for name in KINDS)]},
            {"Packages": ["packages.md", *(each for each in places if "packages/" in each)]},
            {"Decisions": [each for each in places if each.startswith("decisions/")]},
        ]


def _kinds(source: Source) -> str:
    """Return links to the kinds that a distribution has plugins of."""
    return ", ".join(f"[{kind}](kinds/{kind}.md)" for kind in source.kinds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 = built, 1 = refused, with the reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="the folder of the site; it is emptied first")
    options = parser.parse_args(arguments)
    try:
        build(REPOSITORY, options.output)
    except ConfigError as error:
        print(f"site: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
