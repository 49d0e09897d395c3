"""Makes the examples importable and, during each test, discoverable, as if pip had installed them.

If you copy one of these folders and install its package, you do not need this file.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pegboard.plugins import discovery
from pegboard_testing.fake_distributions import FakeDistributions

PROJECTS = sorted(Path(__file__).parent.glob("*/pyproject.toml"))

sys.path += [str(project.parent) for project in PROJECTS]


@pytest.fixture(autouse=True)
def installed_examples(fake_distributions: FakeDistributions, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let discovery find all examples, with metadata made from their pyproject.toml."""
    for path in PROJECTS:
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        fake_distributions.add(project["name"], project["entry-points"], version=project["version"])
    found = discovery.scan_path(None)
    monkeypatch.setattr(discovery, "scan", lambda: found)
    yield
