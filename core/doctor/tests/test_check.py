"""`pegboard check MODEL`: a verdict with its reasons, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pegboard.cli.main import main
from pegboard_doctor import check


def test_what_does_not_run_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "nothing")
    assert main(["check", missing, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["runs"] == "no" and "nothing" in facts["why"]
    assert main(["check", missing]) == 1
    assert capsys.readouterr().out.startswith("runs      no\nwhy       ")


@pytest.mark.real_model
def test_the_default_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--kv-cache-memory-bytes", "1g"]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert told["runs"] == "yes" and told["context"] == "8,192 tokens" and "pegboard-pack-gguf" in told["plugins"]
    assert {"executor:", "sampler:", "scheduling_policy:", "attention:"} <= {
        each.strip().partition(":")[0] + ":" for each in told["plugins"].split(",")
    }


@pytest.mark.real_model
def test_what_does_not_fit_into_memory_does_not_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["check", "--kv-cache-memory-bytes", "64m", "--json"]) == 1
    assert "lower max_model_len to at most" in json.loads(capsys.readouterr().out)["why"]
    monkeypatch.setattr(check, "_free_bytes", lambda registry, settings: 4000)
    assert main(["check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["why"].endswith("and 3.9 KiB are free")
