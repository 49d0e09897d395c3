"""The processor of DeepSeek-OCR, compared with the published procedure, on images of many sizes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_deepseek_vl.ocr_processor import DeepseekOCRProcessor

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.deepseek_images import DEVIATION, MEAN, ocr_views, padded, transformed
from pegboard_testing.media_peers import ImageContract, image_setup, random_images

BASE = 112
SIDE = 48
IMAGE = 2
VALUES = {
    "candidate_resolutions": [[1024, 1024]],
    "downsample_ratio": 4,
    "patch_size": 16,
    "image_mean": MEAN,
    "image_std": DEVIATION,
    "image_token": "<image>",
    "normalize": True,
    "processor_class": "DeepseekVLV2Processor",
}
CONFIG = {
    "vision_config": {"image_size": BASE, "model_name": "deeplip_b_l"},
    "projector_config": {"input_dim": 2048, "n_embed": 32, "projector_type": "linear"},
    "tile_tag": "2D",
    "global_view_pos": "head",
}
SPECIAL = ["<image>"]


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "DeepseekOCRForCausalLM"))


def make(
    folder: Path,
    values: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] = CONFIG,
) -> DeepseekOCRProcessor:
    chosen = {**VALUES, "image_size": SIDE} if values is None else values
    (folder / "processor_config.json").write_text(json.dumps(chosen))
    return DeepseekOCRProcessor(None, image_setup(folder, config, SPECIAL))


def rows(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the rows of these views, line by line."""
    side = -(-(arrays["pixel_values"].shape[-1] // 16) // 4)
    count = side * (side + 1) + 1
    if "crops" in arrays:
        lines, columns = arrays["tiles"].tolist()
        side = -(-(arrays["crops"].shape[-1] // 16) // 4)
        count += lines * side * (columns * side + 1)
    return count


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = SPECIAL

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return rows(arrays)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> DeepseekOCRProcessor:
    return make(tmp_path_factory.mktemp("deepseek_ocr"))


@given(random_images(), st.integers(2, 9), st.sampled_from([BASE, 70]), st.sampled_from([SIDE, 17]))
@settings(max_examples=60, deadline=None)
def test_images(ours: DeepseekOCRProcessor, image: Any, most: int, base: int, side: int) -> None:
    """To the bit."""
    whole, tiles, grid = ocr_views(image, base, side, most)
    asked = {"base_size": base, "image_size": side, "max_crops": most}
    processed = ours.process("image", image, asked)
    np.testing.assert_array_equal(processed.arrays["pixel_values"], whole)
    assert ("crops" in processed.arrays) == (tiles is not None)
    if tiles is not None:
        np.testing.assert_array_equal(processed.arrays["crops"], tiles)
        assert tuple(processed.arrays["tiles"]) == grid
    assert processed.token_ids == [IMAGE] * rows(processed.arrays) and processed.is_row is None


@given(random_images())
@settings(max_examples=10, deadline=None)
def test_images_without_tiles(ours: DeepseekOCRProcessor, image: Any) -> None:
    """Up to 640 pixels, they are stretched."""
    for side in (64, 640, 641):
        view = image.resize((side, side)) if side <= 640 else padded(image, side, side)
        processed = ours.process("image", image, {"crop_mode": False, "image_size": side})
        np.testing.assert_array_equal(processed.arrays["pixel_values"], transformed([view])[0])
        assert processed.arrays.keys() == {"pixel_values"}
        assert len(processed.token_ids) == rows(processed.arrays)


def test_the_published_sizes(tmp_path: Path) -> None:
    """273 rows of an image of 1,024 pixels, and tiles of 640 with 100 rows each, and ends of
    lines."""
    config = {**CONFIG, "vision_config": {}}
    ours = make(tmp_path, {}, config)
    counts = [len(ours.process("image", random_image(*size), {}).token_ids) for size in SIZES]
    assert counts == [273, 273 + 10 * 21, 273 + 30 * 21]


SIZES = [(640, 640), (1300, 641), (800, 1200)]


def test_one_tile_is_none(ours: DeepseekOCRProcessor) -> None:
    asked = {"min_crops": 1, "max_crops": 1}
    assert "crops" not in ours.process("image", random_image(90, 90), asked).arrays


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cropping": False}, "has cropping; DeepSeek-OCR takes base_size, crop_mode, image_size"),
        ({"crop_mode": 0}, "crop_mode=0; expected true or false"),
        ({"base_size": 15}, "base_size=15; expected 16 to 2048 pixels"),
        ({"image_size": 64.0}, "image_size=64.0; expected 16 to 2048 pixels"),
        ({"min_crops": 7}, "min_crops=7 and max_crops=6; expected whole numbers from 1 to 32, t"),
        ({"base_size": 10**6}, "base_size=1000000; expected 16 to 2048 pixels"),
        ({"max_crops": 33}, "max_crops=33; expected whole numbers from 1 to 32"),
    ],
)
def test_options_that_are_refused(
    ours: DeepseekOCRProcessor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ours.process("image", random_image(9, 9), options)
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch_size": 14}, "patch_size=14; expected 16, as in its config.json"),
        ({"downsample_ratio": 2}, "downsample_ratio=2; expected 4"),
        ({"max_crops": 0}, "processor_config.json has min_crops=2 and max_crops=0; expected"),
        ({"image_std": 1}, "image_std=1; expected three positive numbers"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        make(tmp_path, {**VALUES, **values})


def test_configs_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="global_view_pos='tail'; only 'head' is supported"):
        make(tmp_path, VALUES, {**CONFIG, "global_view_pos": "tail"})


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_deepseek_vl.ocr_processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
