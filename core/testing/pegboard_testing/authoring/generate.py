"""Writes every generated file of the repository, or only compares them.

python -m pegboard_testing.authoring.generate --write    what `make docs` calls
python -m pegboard_testing.authoring.generate --check    exit 1 when a file does not match the code
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pegboard_testing.authoring import (
    catalogue,
    formats_page,
    kind_pages,
    metrics_page,
    models_page,
    reference,
    snapshot,
)

Pages = Mapping[Path, Callable[[str], str]]
"""File → the function that makes its new text from its current text, which is empty if there is no
file."""
PAGES: Pages = {
    **catalogue.PAGES,
    **kind_pages.PAGES,
    **reference.PAGES,
    **metrics_page.PAGES,
    **formats_page.PAGES,
    **models_page.PAGES,
    **snapshot.PAGES,
}


def stale(pages: Pages, *, write: bool = False) -> list[Path]:
    """Return the files whose text is not what the code says. write: and bring them up to date."""
    paths = []
    for path, make in pages.items():
        before = path.read_text("utf-8") if path.is_file() else ""
        if (text := make(before)) != before:
            paths.append(path)
            if write:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, "utf-8")
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 = all files are up to date or were written, 1 = some are stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the files")
    action.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args(arguments)
    paths = stale(PAGES, write=options.write)
    for path in paths:
        print(
            f"{path} {'is written' if options.write else 'is stale: run `make docs`'}",
            file=sys.stderr,
        )
    return 1 if paths and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
