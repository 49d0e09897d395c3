"""`pegboard plugins compat` finds the names that a plugin uses, without running it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pegboard.cli.main import main
from pegboard_testing.authoring.scaffold import kinds, write_package
from pegboard_testing.authoring.snapshot import SNAPSHOT

SOURCE = """raise SystemExit("must not run")
from pegboard.interfaces import KINDS, api
from pegboard.interfaces.draft import DraftSpec, DraftTree
from pegboard.interfaces.spec import AtMost
import pegboard.interfaces.platform
from pegboard.interfaces.nothing import Here
from pegboard.errors import PluginError
def later():
    from pegboard.engine.scheduler import Scheduler
"""


def test_each_name_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plugin.py").write_text(SOURCE, "utf-8")
    before = tmp_path / "snapshot.txt"
    now = SNAPSHOT.read_text("utf-8")
    assert "class AtMost()\n    limit: float\n" in now
    before.write_text(
        now.replace("class AtMost()\n    limit: float\n", "class AtMost()\n    most: float\n"),
        "utf-8",
    )
    assert main(["plugins", "compat", str(tmp_path), "--json", "--before", str(before)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(use["symbol"], use["stability"], use["status"]) for use in found] == [
        ("KINDS", "stable", "present"),
        ("api", "stable", "present"),
        ("draft.DraftSpec", "provisional", "present"),
        ("draft.DraftTree", "provisional", "missing"),
        ("spec.AtMost", "stable", "changed"),
        ("platform", "stable", "present"),
        ("nothing.Here", "stable", "missing"),
        ("pegboard.engine.scheduler.Scheduler", "private", "present"),
    ]
    assert found[4]["reason"] == "before: most: float" and found[0]["place"].endswith("plugin.py:2")


@pytest.mark.parametrize("kind", kinds())
def test_new_plugins_use_what_there_is(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_package(kind, "mine", tmp_path)
    assert main(["plugins", "compat", str(folder), "--before", str(SNAPSHOT)]) == 0
    assert "present" in capsys.readouterr().out


def test_wrong_usage_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("def (", "utf-8")
    for words, message in [
        ([str(tmp_path / "none")], "expected a Python file or a folder"),
        ([str(tmp_path)], "broken.py is not Python"),
        ([str(tmp_path), "--before", str(tmp_path / "old.txt")], "there is no such file"),
    ]:
        assert main(["plugins", "compat", *words]) == 2
        assert message in capsys.readouterr().err
