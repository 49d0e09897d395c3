"""Generates `pegboard/plugins/catalogue.json`, {kind: {name: distribution}}, from the pyproject.toml files of the repository.

python -m pegboard_testing.authoring.catalogue --check    exit 1 when the file does not match the repository
python -m pegboard_testing.authoring.catalogue --write
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pegboard.errors import ConfigError
from pegboard.plugins import defaults
from pegboard.plugins.discovery import normalized, unserved_group

FOLDERS = ("core", "plugins", "kernels", "contrib")
CATALOGUE = Path(defaults.__file__).with_name("catalogue.json")
REPOSITORY = Path(__file__).parents[4]

Catalogue = dict[str, dict[str, str]]


def project_files(repository: Path) -> Iterator[Path]:
    """Yield all pyproject.toml files in the folders of plugins, sorted."""
    for folder in FOLDERS:
        for path in sorted((repository / folder).rglob("pyproject.toml")):
            if not any(part.startswith(".") or part in ("build", "dist") for part in path.relative_to(repository).parts):
                yield path


def collect(repository: Path) -> Catalogue:
    """Return {kind: {name: distribution}}, sorted. Raises ConfigError for an unknown kind, and for a name that two distributions
    provide."""
    catalogue: Catalogue = {}
    for path in project_files(repository):
        project = tomllib.loads(path.read_text("utf-8")).get("project", {})
        distribution = normalized(project.get("name", ""))
        for group, points in project.get("entry-points", {}).items():
            if not group.startswith("pegboard."):
                continue
            if reason := unserved_group(group, distribution):
                raise ConfigError(f"{path}: {reason}")
            names = catalogue.setdefault(group.split(".")[1], {})
            for name in points:
                if names.setdefault(name, distribution) != distribution:
                    raise ConfigError(f"{path}: {group} {name!r} is already provided by {names[name]}; names must be unique")
    return {kind: dict(sorted(names.items())) for kind, names in sorted(catalogue.items())}


def render(catalogue: Catalogue) -> str:
    """Return the text of the file."""
    return json.dumps(catalogue, indent=1, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or write the catalogue. Return the exit status: 0 = up to date or written, 1 = stale."""
    parser = argparse.ArgumentParser(prog="python -m pegboard_testing.authoring.catalogue", description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the file")
    action.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--repository", type=Path, default=REPOSITORY, help="root of the repository")
    parser.add_argument("--file", type=Path, default=CATALOGUE, help="the catalogue")
    options = parser.parse_args(arguments)
    text = render(collect(options.repository))
    if options.write:
        options.file.write_text(text, "utf-8")
        return 0
    if options.file.is_file() and options.file.read_text("utf-8") == text:
        return 0
    print(f"{options.file} is stale: run python -m pegboard_testing.authoring.catalogue --write", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
