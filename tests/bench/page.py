"""Put measured numbers into docs/performance.md: the table and the pictures between its two
markers.

    python tests/bench/page.py RESULT.json [--check]

RESULT.json is what bench.py wrote; a copy of it is kept next to the pictures in docs/performance,
so that `--check` without a result can tell whether the page still shows what was measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plot import draw
from report import circumstances, step_line, table

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN = "<!-- numbers: written by tests/bench/page.py -->"
END = "<!-- end of numbers -->"
NOTHING = "Nothing has been measured for this page yet."


def section(result: Mapping[str, Any], pictures: list[str]) -> str:
    """Returns the measured part of the page."""
    shown = "\n".join(f"![{name.removesuffix('.svg')}](performance/{name})" for name in pictures)
    return "\n\n".join(
        [circumstances(result), table(result), f"```text\n{step_line(result)}\n```", shown]
    )


def put(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """Returns the page with a new part between the markers. Raises ValueError when there are no
    markers."""
    pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.S)
    if not pattern.search(page):
        raise ValueError(f"the page has no lines {begin!r} and {end!r}")
    return pattern.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "result",
        nargs="?",
        type=Path,
        help="what bench.py wrote; by default the copy next to the page",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the page differs"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help=f"the page; default {PAGE.name}")
    arguments = parser.parse_args()
    folder = arguments.page.parent / "performance"
    kept = folder / "bench.json"
    source = arguments.result or kept
    if not source.exists():
        text = NOTHING
    else:
        result = json.loads(source.read_text("utf-8"))
        pictures = sorted(
            path.name
            for path in (folder.glob("*.svg") if arguments.check else draw(result, folder))
        )
        text = section(result, pictures)
    before = arguments.page.read_text("utf-8")
    after = put(before, text)
    if arguments.check:
        return int(after != before)
    arguments.page.write_text(after, "utf-8")
    if source.exists() and source != kept:
        kept.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
