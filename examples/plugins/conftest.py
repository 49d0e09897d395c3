"""Makes the examples importable and, for each test, installed: as `pip install` would, without running pip.

A copy of one of these folders does not need this file once its package is installed.
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
    """Discovery finds all examples through metadata made from their pyproject.toml."""
    for path in PROJECTS:
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        fake_distributions.add(project["name"], project["entry-points"], version=project["version"])
    found = discovery.scan_path(None)
    monkeypatch.setattr(discovery, "scan", lambda: found)
    yield
