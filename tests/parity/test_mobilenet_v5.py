"""The vision tower of Gemma 3n, compared with timm's: always with numbers in a file, and opt-in
with timm itself, which is not a dependency:

PEGBOARD_TEST_TIMM   Python of an environment with torch, timm and safetensors
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pegboard_model_gemma3n.stages import STAGES, Attending, Edge, Inverted, Stages
from pegboard_model_gemma3n.vision import VisionTower
from safetensors.torch import load_file
from seeded_tower import STEM, STEP, images, seeded
from torch import Tensor

from pegboard_testing.fake_build import fake_build, load_layers

PYTHON = os.environ.get("PEGBOARD_TEST_TIMM")
NUMBERS = Path(__file__).with_name("mobilenet_v5.json")
SMALL = Stages(
    STEM,
    (
        (Edge(8, stride=2), Edge(8)),
        (Inverted(16, 3, 5, 2, 6), Attending(16, 3, 8, 2), Inverted(16, 5)),
        (Inverted(24, 5, 5, 2, 6), Attending(24, 2, 8), Inverted(24, 0, expansion=2)),
    ),
)
"""`seeded_tower.SMALL`, as the plugin writes it."""
TOWERS = {"small": SMALL, "whole": STAGES}


@torch.no_grad()
def rows_of(name: str, dtype: str = "float32") -> dict[str, Tensor]:
    """Return what our tower makes of each image."""
    build = replace(fake_build(), dtype=dtype)
    tower = VisionTower(build, TOWERS[name])
    wanted = [each for layer in build.declared.layers for each in layer.declare({})]
    tensors = seeded({each.name: each.shape for each in wanted})
    assert load_layers(build.declared.layers, tensors) == {*tensors}
    return {key: tower.forward(pixels) for key, pixels in images(name).items()}


def check(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, rows in theirs.items():
        torch.testing.assert_close(
            ours[key], rows, atol=1e-4, rtol=1e-4, msg=lambda m, k=key: f"{k}: {m}"
        )


def kept(path: Path) -> dict[str, Tensor]:
    """Return the numbers in a file, by the image."""
    return {key: torch.tensor(rows) for key, rows in json.loads(path.read_text())["rows"].items()}


def test_numbers_that_timm_computed() -> None:
    rows, channels = STEP
    ours = {key: value[::rows, ::channels] for key, value in rows_of("small").items()}
    check(ours, kept(NUMBERS))


def test_half_precision() -> None:
    """Rows are near those of float32, and have the type of the model."""
    for key, rows in rows_of("small", dtype="bfloat16").items():
        assert rows.dtype == torch.bfloat16
        whole = rows_of("small")[key]
        assert (rows.float() - whole).abs().mean() < 0.02 * whole.abs().mean(), key


@pytest.mark.skipif(not PYTHON, reason="set PEGBOARD_TEST_TIMM")
def test_the_rows_of_timm(tmp_path: Path) -> None:
    script = Path(__file__).with_name("write_with_timm.py")
    subprocess.run([str(PYTHON), str(script), str(tmp_path)], check=True)
    for name in TOWERS:
        check(rows_of(name), load_file(tmp_path / f"{name}.safetensors"))
    check(kept(NUMBERS), kept(tmp_path / NUMBERS.name))
