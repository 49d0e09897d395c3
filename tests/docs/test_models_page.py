"""docs/models.md lists what an installation has."""

from __future__ import annotations

import pkgutil
import re
import tomllib
from typing import Any

from pegboard.plugins import discovery
from pegboard_testing.authoring import models_page

ROW = re.compile(r"\| `([^`]+)` \| `([^`]+)` \|")


def running() -> dict[str, str]:
    """Return the distribution of each architecture that the page says runs with its own plugin."""
    return dict(ROW.findall(models_page.PAGE.read_text("utf-8")))


def test_each_listed_architecture_is_an_installed_plugin_that_loads() -> None:
    listed = running()
    assert len(listed) > 100
    entries = {entry.name: entry for entry in discovery.scan().entries if entry.kind == "model"}
    assert listed == {name: entries[name].distribution for name in listed if name in entries}
    implementations: set[str] = set()
    for name in listed:
        spec: Any = pkgutil.resolve_name(entries[name].value)
        implementations.add(spec.implementation)
    for implementation in sorted(implementations):
        assert callable(pkgutil.resolve_name(implementation)), implementation


def test_remarks_are_of_architectures_that_run() -> None:
    data = tomllib.loads(models_page.DATA.read_text("utf-8"))
    assert models_page.reasons(data["remarks"]).keys() <= running().keys()
