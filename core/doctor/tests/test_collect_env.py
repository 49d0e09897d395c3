"""`pegboard collect-env`: the report of an installation."""

from __future__ import annotations

import json

import pytest

from pegboard.cli.main import main


def test_collect_env(capsys: pytest.CaptureFixture[str]) -> None:
    """The report contains versions, the machine and plugins, but nothing about the user's files."""
    assert main(["collect-env", "--no-torch", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["pegboard"] and report["processor"]["usable cores"] >= 1
    assert {"kind", "name", "distribution"} <= set(report["plugins"][0])
    assert main(["collect-env", "--no-torch"]) == 0
    assert "\nplugins:\n" in capsys.readouterr().out
