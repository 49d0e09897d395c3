"""A short run of the campaign."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

sys.path.insert(0, str(Path(__file__).parent))

from hostile_media import ReaderProcess, files, mutated, run, send


def test_damaged_media_are_read_or_refused() -> None:
    results, wrong = run(230)
    assert not wrong
    for modality in ("image", "audio", "video"):
        assert results[f"{modality} read"] and results[f"{modality} refused"]


@pytest.mark.slow
def test_damaged_images_over_http() -> None:
    """Only the campaign looks at the time."""
    results, wrong = send(40)
    assert not [each for each in wrong if not each.startswith("/health")]
    assert results["image answered"] and results["image refused"]


def test_a_small_file_of_an_hour() -> None:
    """Silence is packed well: half a megabyte takes less than a gigabyte."""
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", 48_000, 1, format="FLAC") as sound:
        for _ in range(3600):
            sound.write(np.zeros(48_000, np.int16))
    reader = ReaderProcess()
    try:
        assert len(file.getvalue()) < 2**20
        assert reader.read("audio", file.getvalue()) == "read"
    finally:
        reader.close()


def test_a_seed_is_always_the_same_file() -> None:
    content = files()[0][1]
    assert mutated(content, 5) == mutated(content, 5) != mutated(content, 6)
