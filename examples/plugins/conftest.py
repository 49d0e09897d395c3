"""Makes the examples importable and, during each test and while tests are collected, discoverable,
as if pip had installed them.

If you copy one of these folders and install its package, you do not need this file.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pegboard.plugins import discovery
from pegboard_testing.fake_distributions import FakeDistributions

PROJECTS = sorted(Path(__file__).parent.glob("*/pyproject.toml"))

sys.path += [str(project.parent) for project in PROJECTS]


def installed(fakes: FakeDistributions) -> discovery.Scan:
    """Install the metadata of all examples in a folder of sys.path, and return what discovery finds
    then."""
    for path in PROJECTS:
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        fakes.add(project["name"], project["entry-points"], version=project["version"])
    return discovery.scan_path(sys.path)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The contract tests of output parsers are made while their examples are collected."""
    if collector.path.name != "examples.py":
        return (yield)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.syspath_prepend(folder)
        scan = installed(FakeDistributions(Path(folder)))
        patch.setattr(discovery, "scan", lambda: scan)
        return (yield)


@pytest.fixture(autouse=True)
def installed_examples(
    fake_distributions: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Let discovery find all examples, with metadata made from their pyproject.toml."""
    scan = installed(fake_distributions)
    monkeypatch.setattr(discovery, "scan", lambda: scan)
    yield
