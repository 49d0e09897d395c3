"""The processors of DeepSeek-VL2 and DeepSeek-OCR compared with vLLM's: the same pixels, to the
bit, and as many tokens.

Opt-in: PEGBOARD_PEER_VLLM names the Python of an environment that has vLLM (CPU) and torchvision.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pegboard_model_deepseek_vl.ocr_processor import DeepseekOCRProcessor
from pegboard_model_deepseek_vl.processor import DeepseekVL2Processor

from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.media_peers import image_setup

PEER = os.environ.get("PEGBOARD_PEER_VLLM")
COLORS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
SHAPES = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 9), (9, 1)]
VL2 = {
    **COLORS,
    "candidate_resolutions": [[384 * columns, 384 * lines] for columns, lines in SHAPES],
    "patch_size": 14,
    "downsample_ratio": 2,
}
OCR = {**COLORS, "image_size": 640, "base_size": 1024, "patch_size": 16, "downsample_ratio": 4}
VL2_CONFIG = {"vision_config": {"patch_size": 14, "width": 1152}}
OCR_CONFIG = {"projector_config": {"projector_type": "linear", "input_dim": 2048}}

pytestmark = pytest.mark.skipif(PEER is None, reason="PEGBOARD_PEER_VLLM names no Python with vLLM")


def their_answers(images: list[str]) -> dict[str, list[Any]]:
    """Return what vLLM makes of images in files."""
    vl2 = {**VL2, "image_size": 384}
    ocr = {**OCR, "max_crops": 6, "strategy": "v1"}
    job = json.dumps({"images": images, "vl2": vl2, "ocr": ocr})
    script = Path(__file__).with_name("vllm_deepseek_images.py")
    command = [str(PEER), str(script)]
    done = subprocess.run(command, input=job, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, list[Any]] = json.loads(done.stdout)
    return answers


def summary(processed: Any) -> list[Any]:
    """Return digests of the pixels, and the number of tokens."""
    arrays: Mapping[str, np.ndarray] = processed.arrays
    pixels = [arrays[name] for name in ("pixel_values", "crops") if name in arrays]
    digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in pixels]
    return [digests, len(processed.token_ids)]


def test_same_pixels_as_vllm(tmp_path: Path) -> None:
    sizes = [*np.random.default_rng(5).integers(3, 1800, (20, 2)).tolist(), [640, 640], [641, 641]]
    images = [random_image(width, height, seed) for seed, (width, height) in enumerate(sizes)]
    paths = [str(tmp_path / f"{number}.png") for number in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    theirs = their_answers(paths)
    values: dict[str, Any] = {"vl2": VL2, "ocr": OCR}
    configs: dict[str, Any] = {"vl2": VL2_CONFIG, "ocr": OCR_CONFIG}
    kinds: dict[str, Any] = {"vl2": DeepseekVL2Processor, "ocr": DeepseekOCRProcessor}
    for name, kind in kinds.items():
        (tmp_path / "processor_config.json").write_text(json.dumps(values[name]))
        ours = kind(None, image_setup(tmp_path, configs[name], ["<image>"]))
        for image, size, expected in zip(images, sizes, theirs[name], strict=True):
            assert summary(ours.process("image", image, {})) == expected, (name, size)
