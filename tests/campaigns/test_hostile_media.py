"""A short run of the campaign."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from hostile_media import files, mutated, run


def test_damaged_media_are_read_or_refused() -> None:
    results, wrong = run(230)
    assert not wrong
    for modality in ("image", "audio", "video"):
        assert results[f"{modality} read"] and results[f"{modality} refused"]


def test_a_seed_is_always_the_same_file() -> None:
    content = files()[0][1]
    assert mutated(content, 5) == mutated(content, 5) != mutated(content, 6)
