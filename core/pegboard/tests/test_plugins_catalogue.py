"""The catalogue is collected from the pyproject files of a repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.errors import ConfigError
from pegboard.interfaces import HOOKS_GROUP, KINDS
from pegboard.plugins import defaults
from pegboard_testing.authoring import catalogue


def project(folder: Path, name: str, group: str, *points: str) -> None:
    folder.mkdir(parents=True)
    lines = [
        f'[project]\nname = "{name}"\n[project.entry-points."{group}"]',
        *(f'"{point}" = "m:X"' for point in points),
    ]
    (folder / "pyproject.toml").write_text("\n".join(lines))


def test_collect(tmp_path: Path) -> None:
    project(
        tmp_path / "plugins/model/llama", "pegboard-model-llama", "pegboard.model.v1", "Llama", "*"
    )
    project(tmp_path / "kernels/cpu", "pegboard-kernel-cpu", "pegboard.kernel.v1", "rms_norm.avx2")
    project(tmp_path / "contrib/hooks/audit", "Acme_Audit", HOOKS_GROUP, "audit")
    project(tmp_path / "plugins/model/llama/build/copy", "stale", "pegboard.model.v1", "Stale")
    project(tmp_path / "examples/other", "other", "pegboard.model.v1", "Other")
    assert catalogue.collect(tmp_path) == {
        "hooks": {"audit": "acme-audit"},
        "kernel": {"rms_norm.avx2": "pegboard-kernel-cpu"},
        "model": {"*": "pegboard-model-llama", "Llama": "pegboard-model-llama"},
    }


@pytest.mark.parametrize(
    ("group", "match"),
    [("pegboard.modle.v1", "unknown kind"), ("pegboard.model.v1", "already provided by one")],
)
def test_wrong_repositories_are_refused(tmp_path: Path, group: str, match: str) -> None:
    project(tmp_path / "plugins/a", "one", "pegboard.model.v1", "Llama")
    project(tmp_path / "plugins/b", "two", group, "Llama")
    with pytest.raises(ConfigError, match=match):
        catalogue.collect(tmp_path)


def test_defaults_are_about_kinds_that_exist() -> None:
    assert defaults.default_model().partition(":")[1]
    for kind in KINDS.values():
        assert not defaults.default_enabled(kind.name) or kind.ambient
        chosen = defaults.default_name(kind.name)
        assert chosen is None or not kind.ambient
    assert defaults.default_enabled("hooks") == ()
