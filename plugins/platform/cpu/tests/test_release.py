"""Weights of a sleeping engine go to a disk, so that sleep frees memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from pegboard_platform_cpu import release
from pegboard_platform_cpu.release import is_memory, saving_folder


def mounts(**kinds: str) -> str:
    """Lines of mountinfo: a place with _ for / → its type."""
    return "\n".join(
        f"{number} 1 0:{number} / {place.replace('_', '/')} rw shared:1 - {kind} source rw"
        for number, (place, kind) in enumerate(kinds.items())
    )


@pytest.mark.parametrize(
    ("folder", "kinds", "expected"),
    [
        ("/tmp/a", {"_": "ext4"}, False),
        ("/tmp/a", {"_": "ext4", "_tmp": "tmpfs"}, True),
        ("/tmp", {"_": "ext4", "_tmp": "tmpfs"}, True),
        ("/tmp2", {"_": "ext4", "_tmp": "tmpfs"}, False),
        ("/tmp/a/b", {"_tmp": "tmpfs", "_tmp_a": "xfs", "_": "ext4"}, False),
        ("/tmp", {"_": "ext4", "_tmp": "tmpfs", "_tmp_": "overlay"}, True),
        ("/x", {"_": "ramfs"}, True),
        ("/x", {}, False),
    ],
)
def test_what_is_in_memory(folder: str, kinds: dict[str, str], expected: bool) -> None:
    assert is_memory(folder, mounts(**kinds)) is expected


def test_the_last_mount_at_a_place_counts() -> None:
    assert not is_memory("/tmp", f"{mounts(_tmp='tmpfs')}\n{mounts(_tmp='ext4')}")


def test_this_system() -> None:
    text = Path("/proc/self/mountinfo").read_text()
    if os.path.ismount("/dev/shm"):
        assert is_memory("/dev/shm/x", text)
    assert not is_memory("/proc", text)


def test_where_weights_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/memory")
    monkeypatch.setattr(release, "ON_DISK", str(tmp_path))
    assert saving_folder(mounts(_="ext4")) == "/memory"
    assert saving_folder(mounts(_="ext4", _memory="tmpfs")) == str(tmp_path)
    assert not caplog.messages
    assert saving_folder(mounts(_="tmpfs")) == "/memory"
    assert "set TMPDIR to a folder on a disk" in caplog.text
