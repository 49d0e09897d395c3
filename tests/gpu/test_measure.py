"""The script that checks and measures a GPU runs to its end here, in Triton's interpreter, and can
be resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("measure.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_it_runs_without_a_gpu_and_can_be_resumed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "measure.json"
    out.write_text(
        json.dumps(
            {"rms_norm_float32": {"right": True, "kept": 1}, "rope_float32": {"right": False}}
        ),
        "utf-8",
    )
    done = run("--device", "cpu", "--interpret", "--tiny", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text("utf-8"))
    assert results["rms_norm_float32"] == {"right": True, "kept": 1}, (
        "what is known is not measured again"
    )
    assert results["rope_float32"]["right"] and results["attention_bfloat16"]["error"] < 1e-2
    assert results["bench_decode_attention"]["rate"] > 0 and results["machine"]["tiny"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_what_is_missing() -> None:
    done = run()
    assert (
        done.returncode == 2
        and "torch finds no GPU; --device cpu --interpret --tiny" in done.stderr
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch finds none")
def test_a_gpu_is_right(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "measure.json"))
    assert done.returncode == 0, done.stdout + done.stderr
