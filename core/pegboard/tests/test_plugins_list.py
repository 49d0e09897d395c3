"""`pegboard plugins list` runs no plugin code."""

from __future__ import annotations

import json
import sys

import pytest

from pegboard.cli.main import main
from pegboard.plugins import discovery
from pegboard_testing.fake_distributions import FakeDistributions


@pytest.fixture
def fakes(
    fake_distributions: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> FakeDistributions:
    monkeypatch.setattr(discovery, "scan", fake_distributions.scan)
    return fake_distributions


def run(*words: str) -> int:
    return main(["plugins", *words])


def test_list_runs_no_plugin_code(
    fakes: FakeDistributions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {
        "attention": {"a": "deadly:A"},
        "hooks": {"h": "deadly"},
        "metrics": {"m": "deadly:M"},
    }
    fakes.add(
        "acme",
        {
            **points,
            "pegboard.sampler.v8": {"s": "deadly:S"},
            "pegboard.pooler.v1": {"p": "deadly:P"},
        },
        {"deadly": "raise SystemExit('imported')\n"},
    )
    monkeypatch.setenv("PEGBOARD_PLUGINS", "attention:a")
    assert run("list") == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert "acme" in lines["a"] and "upgrade pegboard" in lines["s"]
    assert "not enabled" in lines["h"] and "not enabled" in lines["m"]
    assert lines["p"].endswith("upgrade acme")
    assert "deadly" not in sys.modules
    assert run("list", "--kind", "attention", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["name"] == "a" and row["enabled"] is True
    assert run("list", "--kind", "atention") == 2
    assert "did you mean 'attention'" in capsys.readouterr().err


def test_list_without_plugins(fakes: FakeDistributions, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0 and "no plugins are installed" in capsys.readouterr().out
    assert run("list", "--json") == 0 and json.loads(capsys.readouterr().out) == []


def test_other_actions_are_commands(
    fakes: FakeDistributions, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("why", "sampler") == 2 and "pip install pegboard-doctor" in capsys.readouterr().err
    fakes.add(
        "acme",
        {
            "command": {
                "plugins-count": "acme:COUNT",
                "plugins-weigh": "acme:WEIGH",
                "greet": "acme:GREET",
            }
        },
    )
    assert run("cuont") == 2 and "choose from 'list', 'count', 'weigh'" in capsys.readouterr().err
    assert main(["--help"]) == 0 and "\n  greet, plugins count|weigh  \n" in capsys.readouterr().out
