"""Generates `pegboard/plugins/catalogue.json`, {kind: {name: distribution}}, from the
pyproject.toml files of the repository."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

from pegboard.errors import ConfigError
from pegboard.installed import SETTINGS_GROUP, normalized
from pegboard.plugins import defaults
from pegboard.plugins.discovery import unserved_group

FOLDERS = ("core", "plugins", "kernels", "contrib")
CATALOGUE = Path(defaults.__file__).with_name("catalogue.json")
REPOSITORY = Path(__file__).parents[4]

Catalogue = dict[str, dict[str, str]]


def project_files(repository: Path) -> Iterator[Path]:
    """Yield all pyproject.toml files in the folders of plugins, sorted."""
    for folder in FOLDERS:
        for path in sorted((repository / folder).rglob("pyproject.toml")):
            if not any(
                part.startswith(".") or part in ("build", "dist")
                for part in path.relative_to(repository).parts
            ):
                yield path


def collect(repository: Path) -> Catalogue:
    """Return {kind: {name: distribution}}, sorted. Raises ConfigError for an unknown kind, and for
    a name that two distributions provide."""
    catalogue: Catalogue = {}
    for path in project_files(repository):
        project = tomllib.loads(path.read_text("utf-8")).get("project", {})
        distribution = normalized(project.get("name", ""))
        for group, points in project.get("entry-points", {}).items():
            if not group.startswith("pegboard.") or group == SETTINGS_GROUP:
                continue
            if reason := unserved_group(group, distribution):
                raise ConfigError(f"{path}: {reason}")
            names = catalogue.setdefault(group.split(".")[1], {})
            for name in points:
                if names.setdefault(name, distribution) != distribution:
                    raise ConfigError(
                        f"{path}: {group} {name!r} is already provided by {names[name]}; names "
                        "must be unique"
                    )
    return {kind: dict(sorted(names.items())) for kind, names in sorted(catalogue.items())}


def render(catalogue: Catalogue) -> str:
    """Return the text of the file."""
    return json.dumps(catalogue, indent=1, ensure_ascii=False) + "\n"


PAGES = {CATALOGUE: lambda before: render(collect(REPOSITORY))}
