"""The processor, compared with the published rules in torch, on images of many sizes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_kimi_vl.processor import TEXT, VALUES, KimiVLProcessor
from PIL import Image, ImageOps
from torch import Tensor

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.media_peers import ImageContract, image_setup, random_images

SPECIAL = ["<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
PAD = 4
LIMIT = 40
CONFIG = {"model_type": "kimi_vl", "media_placeholder_token_id": PAD}
FILE: dict[str, Any] = {
    "image_processor_type": "KimiVLImageProcessor",
    "auto_map": {"AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor"},
    "in_token_limit": LIMIT,
    "pad_input": True,
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "num_pooled_tokens": 1024,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_entries(kind: str) -> None:
    check_entry(installed_entry(kind, "KimiVLForConditionalGeneration"))


def make(folder: Path, config: Mapping[str, Any] = CONFIG, **values: Any) -> KimiVLProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps({**FILE, **values}))
    return KimiVLProcessor(None, image_setup(folder, config, SPECIAL))


@pytest.fixture(scope="module", params=[True, False], ids=["padded", "cropped"])
def ours(request: Any, tmp_path_factory: pytest.TempPathFactory) -> KimiVLProcessor:
    return make(tmp_path_factory.mktemp("kimi_vl"), pad_input=request.param)


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = SPECIAL

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return int(arrays["image_grid_hw"].prod()) // 4


def published(image: Any, limit: int, *, is_padded: bool) -> tuple[Tensor, tuple[int, int]]:
    """Return the patches of an image, and how many are below and beside each other. The corners of
    a crop are rounded as in torchvision."""
    count = (image.width // 14) * (image.height // 14)
    if count > limit:
        scale = math.sqrt(limit / count)
        size = int(image.width * scale), int(image.height * scale)
        image = image.resize(size, Image.Resampling.BICUBIC)
    width, height = image.size
    if is_padded:
        border = 0, 0, (28 - width % 28) % 28, (28 - height % 28) % 28
        image = ImageOps.expand(image, border, fill=(0, 0, 0))
    else:
        width, height = width - width % 28, height - height % 28
        left = round((image.width - width) / 2.0)
        top = round((image.height - height) / 2.0)
        image = image.crop((left, top, left + width, top + height))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
    mean, deviation = (
        torch.tensor(FILE[name])[:, None, None] for name in ("image_mean", "image_std")
    )
    pixels = pixels.sub(mean).div(deviation)
    grid = image.height // 14, image.width // 14
    cut = pixels.reshape(3, grid[0], 14, grid[1], 14).permute(1, 3, 0, 2, 4)
    return cut.reshape(-1, 3, 14, 14), grid


@given(random_images(), st.sampled_from([None, 7, 1000]))
@settings(max_examples=40, deadline=None)
def test_images(ours: KimiVLProcessor, image: Any, limit: int | None) -> None:
    """To the bit. Images of which no block is left are refused."""
    options = {} if limit is None else {"in_token_limit": limit}
    patches, grid = published(image, limit or LIMIT, is_padded=ours.is_padded)
    if not min(grid):
        with pytest.raises(RequestError, match=f"becomes {grid[1]} × {grid[0]} patches of 14"):
            ours.process("image", image, options)
        return
    processed = ours.process("image", image, options)
    np.testing.assert_array_equal(processed.arrays["pixel_values"], patches.numpy())
    assert processed.arrays["pixel_values"].dtype == np.float32
    assert processed.arrays["image_grid_hw"].tolist() == [*grid]
    assert processed.token_ids == [PAD] * (grid[0] * grid[1] // 4)


def test_the_placeholder(ours: KimiVLProcessor) -> None:
    placeholder = ours.placeholder("image")
    assert (placeholder.text, placeholder.token_ids) == (TEXT, (PAD,))
    assert all(mark in TEXT for mark in SPECIAL)


def test_values_that_a_file_lacks(tmp_path: Path) -> None:
    ours = KimiVLProcessor(None, image_setup(tmp_path, {}, SPECIAL))
    assert (ours.limit, ours.is_padded, ours.token) == (4096, False, 163605)
    assert VALUES["image_mean"] == tuple(FILE["image_mean"])


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        ((9, 9), {"sharpen": 2}, "sharpen; Kimi-VL takes in_token_limit"),
        (
            (9, 9),
            {"in_token_limit": 0},
            "in_token_limit=0; expected a whole number from 1 to 16",
        ),
        ((9, 9), {"in_token_limit": True}, "in_token_limit=True; expected a whole number"),
        ((7168, 3), {}, "becomes 512 × 2 patches of 14 pixels; the model takes from 1 to 511"),
        ((14, 14 * 500), {"in_token_limit": 1}, "0 × 313 of them are left for 1 patches"),
    ],
)
def test_what_requests_may_not_ask(
    tmp_path: Path, size: tuple[int, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        make(tmp_path).process("image", random_image(*size), options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch_size": 16}, "patch_size=16; expected the 14 of vision_config"),
        ({"merge_kernel_size": [1, 1]}, r"expected the \[2, 2\] of vision_config"),
        ({"merge_kernel_size": 2}, "merge_kernel_size=2; expected two equal whole numbers"),
        ({"in_token_limit": 0}, "in_token_limit=0; expected a whole number from 1 on"),
        ({"pad_input": "yes"}, "pad_input='yes'; expected true or false"),
        ({"image_mean": [0.5]}, r"image_mean=\[0.5\]; expected three numbers"),
        ({"image_std": [1, 1, 0]}, r"image_std=\[1, 1, 0\]; expected three numbers that"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, **values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"media_placeholder_token_id": -1}, "media_placeholder_token_id=-1; expected the id"),
        ({"vision_config": {"model_type": "clip"}}, "model_type='clip'; expected 'moonvit'"),
        ({"vision_config": {"merge_kernel_size": [2, 1]}}, r"merge_kernel_size=\[2, 1\]"),
        ({"vision_config": {"hidden_size": 1160}}, "num_heads=16; expected a divisor"),
        ({"vision_config": {"patch_size": 0}}, "patch_size=0; expected a whole number"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, {**CONFIG, **config})


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_kimi_vl.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
