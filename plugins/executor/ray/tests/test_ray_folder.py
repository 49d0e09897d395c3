"""The folder of a Ray that was started here goes with its owner."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from pegboard_executor_ray import folder
from pegboard_executor_ray.folder import RayFolder

WAIT = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from pegboard_executor_ray import folder
folder.LONGEST = 1000
print(folder.RayFolder().path, flush=True)
time.sleep(600)
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folder, "LONGEST", 1000)
    other = tmp_path / "pegboard-ray-being-made"
    other.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", WAIT, tmp_path], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            killed = Path(process.stdout.readline().strip())
            (killed / "session").mkdir()
            mine = RayFolder()
            assert killed.is_dir() and Path(mine.path).is_dir()  # its owner lives
        finally:
            process.send_signal(signal.SIGKILL)
    assert killed.is_dir()
    another = RayFolder()
    assert not killed.exists() and other.is_dir() and Path(mine.path).is_dir()
    mine.remove()
    another.remove()
    assert list(tmp_path.iterdir()) == [other]


def test_a_long_path_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths of Ray's sockets would be longer than the system takes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 30)))
    short = RayFolder()
    assert Path(short.path).parent == Path("/tmp")
    short.remove()
