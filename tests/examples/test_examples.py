"""The examples run unchanged, each in its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.real_model


def run(name: str, temp: Path) -> str:
    """Returns the output of the example. It must succeed, print nothing unexpected and leave no
    files."""
    env = {**os.environ, "TMPDIR": str(temp)}
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=240, env=env
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr and "Warning" not in ended.stderr, ended.stderr
    assert [path.name for path in temp.iterdir() if path.name.startswith("pegboard")] == []
    return ended.stdout


def test_demo(smollm2_gguf: Path, tmp_path: Path) -> None:
    """The example prints the greedy answer of the default model, then the numbers."""
    printed = run("demo.py", tmp_path)
    question = re.search(r"^> (.+)$", printed, re.M)
    assert question and len(printed.partition(question[1])[2].split()) > 20
    numbers = re.search(
        r"time to first token (\d+) ms, ([\d.]+) tokens/s \((\d+) tokens\)", printed
    )
    assert numbers and int(numbers[1]) > 0 < float(numbers[2]) and 20 < int(numbers[3]) <= 80


def test_offline_generate(smollm2_gguf: Path, tmp_path: Path) -> None:
    printed = run("offline_generate.py", tmp_path)
    assert "'The capital of France is' -> " in printed and "Paris" in printed
    assert "'A paged KV cache is' -> " in printed and "red" in printed.lower()


def test_offline_data_parallel(smollm2_gguf: Path, tmp_path: Path) -> None:
    printed = run("offline_data_parallel.py", tmp_path)
    assert "'The capital of France is' -> " in printed and "Paris" in printed
    assert len(printed.splitlines()) == 4


def test_fetch_default_model(smollm2_gguf: Path, tmp_path: Path) -> None:
    """The example finds the model in the cache and prints its path."""
    assert Path(run("fetch_default_model.py", tmp_path).strip()) == smollm2_gguf


def test_train_and_serve(tmp_path: Path) -> None:
    """The engine answers better from round to round, because it has the trainer's weights."""
    rewards = [
        float(found)
        for found in re.findall(r"mean reward (\d\.\d+)", run("train_and_serve.py", tmp_path))
    ]
    assert len(rewards) == 8 and rewards[0] < 0.6 and rewards[-1] > rewards[0] + 0.15
