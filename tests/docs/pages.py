"""The documentation as data: pages, code blocks, commands, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_PACKAGES = ("core/*", "plugins/*/*", "kernels/*", "contrib/*/*", "examples/plugins/*")
PACKAGE_PAGES = sorted(path for folder in _PACKAGES for path in ROOT.glob(f"{folder}/README.md"))
"""The pages inside the packages."""

PROJECTS = sorted(path for folder in _PACKAGES for path in ROOT.glob(f"{folder}/pyproject.toml"))
"""Every distribution of the repository, the examples included."""

PROGRAMS = ("pegboard", "make", "pip", "python")


@dataclass(frozen=True)
class Block:
    """A block of code. language: that of the fence, "" when the block is indented. source: the file
    that a fence was taken from, named by a line "From `file`:" before it."""

    page: Path
    line: int
    language: str
    text: str
    source: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One shell line of a page. output: the text that the page shows below it, or None when it
    shows none."""

    block: Block
    words: tuple[str, ...]
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.block.page.relative_to(ROOT)}: {' '.join(self.words)}"


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Returns all code blocks of a page, in order."""
    lines = page.read_text("utf-8").splitlines()
    found: list[Block] = []
    source: str | None = None
    index = 0
    while index < len(lines):
        line = lines[index]
        if fence := re.match(r"```(.*)$", line):
            end = next(i for i in range(index + 1, len(lines)) if lines[i] == "```")
            found.append(
                Block(page, index + 1, fence[1].strip(), "\n".join(lines[index + 1 : end]), source)
            )
            index = end + 1
        elif line.startswith("    ") and index and not lines[index - 1].strip():
            end = index
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            found.append(
                Block(
                    page, index + 1, "", "\n".join(text[4:] for text in lines[index:end]).rstrip()
                )
            )
            index = end
        else:
            if line.strip():
                named = re.search(r"From `([^`]+)`:$", line)
                source = named[1] if named else None
            index += 1
    return tuple(found)


def commands(page: Path) -> Iterator[Command]:
    """Yields the shell lines of indented blocks, and those after "$ " in `console` fences with the
    output shown."""
    for block in blocks(page):
        if block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
                line, _, output = part.partition("\n")
                yield Command(block, tuple(shlex.split(line)), output.strip())
        elif not block.language:
            for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
                if line.partition(" ")[0] in PROGRAMS:
                    yield Command(block, tuple(shlex.split(line, comments=True)))


def all_commands(*programs: str) -> list[Command]:
    """Returns the commands of all pages that start with one of `programs`."""
    return [
        command
        for page in [*PAGES, *PACKAGE_PAGES]
        for command in commands(page)
        if command.words[0] in programs
    ]


def prose(page: Path) -> str:
    """Returns a page without its fences."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yields (file, anchor) of every link to a file of the repository; "" = no anchor."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            yield (page.parent / name if name else page), anchor


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, in the form that code hosts use."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
