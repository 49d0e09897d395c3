"""Fake installed packages: `.dist-info` folders and modules in a temporary folder.

fakes = FakeDistributions(tmp_path)
fakes.add("acme-attention", {"attention": {"fast": "acme_attention:FAST"}}, {"acme_attention":
spec_source("attention")}) registry = Registry(fakes.scan())      # import needs the folder on
sys.path
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pegboard.interfaces import KINDS
from pegboard.plugins.discovery import Scan, scan_path


class FakeDistributions:
    """A folder that looks like site-packages."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self,
        name: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
    ) -> None:
        """Install a distribution. entry_points: {kind or whole group: {name: "module:OBJECT"}}.
        modules: {module name: source}."""
        info = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        metadata = [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
            *(f"Requires-Dist: {text}" for text in requires),
        ]
        (info / "METADATA").write_text("\n".join(metadata) + "\n", "utf-8")
        lines = []
        for kind, points in entry_points.items():
            group = KINDS[kind].group if kind in KINDS else f"pegboard.{kind}.v1"
            lines.append(f"[{kind if kind.startswith('pegboard.') else group}]")
            lines += [f"{point} = {value}" for point, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")
        self.write(**(modules or {}))

    def write(self, **modules: str) -> None:
        """Write modules that belong to no distribution. modules: name → source."""
        for module, source in modules.items():
            (self.root / f"{module}.py").write_text(source, "utf-8")
        importlib.invalidate_caches()

    def scan(self) -> Scan:
        """Return what discovery finds in this folder only."""
        return scan_path([str(self.root)])


def spec_source(kind: str, name: str = "SPEC", **fields: object) -> str:
    """Return the source of a module with one spec called `name`. fields: fields of the spec and
    their values. `implementation` defaults to dict."""
    module, _, spec_class = KINDS[kind].spec.partition(":")
    api = f"{KINDS[kind].major}.0"
    given = {"api": api, "implementation": "builtins:dict", **fields}
    arguments = ", ".join(f"{field}={value!r}" for field, value in given.items())
    return (
        f"from {module} import {spec_class}\n"
        f"from pegboard.interfaces.spec import AtMost, Multiple\n"
        f"{name} = {spec_class}({arguments})\n"
    )
