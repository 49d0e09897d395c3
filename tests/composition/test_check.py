"""`pegboard check` says no where `pegboard serve` would not start, and what of a checkpoint is not
served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard.cli.main import main


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def told(capsys: pytest.CaptureFixture[str], model: Path, *flags: str) -> dict[str, Any]:
    status = main(["check", str(model), "--kv-cache-memory-bytes", "1m", *flags, "--json"])
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (facts["runs"] == "no")
    return facts


def test_a_whole_checkpoint_runs(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = told(capsys, copy)
    assert facts["runs"] == "yes" and "left out" not in facts
    number, unit = facts["memory"].split()[1:3]
    assert float(number) * {"MiB": 1, "GiB": 1024}[unit] > 50, (
        "the program itself, with torch, is counted"
    )


def test_without_a_tokenizer(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in copy.glob("tokenizer*"):
        path.unlink()
    facts = told(capsys, copy)
    assert facts["runs"] == "no" and "tokenizer" in facts["why"]
    assert told(capsys, copy, "--skip-tokenizer-init")["runs"] == "yes"


def test_without_a_tensor(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    facts = told(capsys, copy)
    assert (
        facts["runs"] == "no"
        and "lacks 1 tensors" in facts["why"]
        and "layers.1.mlp.up_proj" in facts["why"]
    )


def test_what_is_not_served_is_said(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "model.safetensors"
    config = copy / "config.json"
    save_file(
        load_file(file) | {f"vision_tower.layers.{i}.weight": torch.zeros(2) for i in range(3)},
        file,
    )
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "vision_config": {"hidden_size": 2}})
    )
    facts = told(capsys, copy)
    assert facts["runs"] == "yes"
    assert facts["left out"] == (
        "3 tensors that the model does not read: vision_tower (3); only its text is served, "
        "without vision"
    )
