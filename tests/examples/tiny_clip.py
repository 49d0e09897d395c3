"""A tiny CLIP with random weights, as the parity tests have it."""

from __future__ import annotations

from pathlib import Path

from tiny_examples import ROOT


def write_clip(folder: Path) -> Path:
    """Write a CLIP with its processor and tokenizer."""
    import runpy

    runpy.run_path(str(ROOT / "tests/parity/test_clip_parity.py"))["write"](folder)
    return folder
