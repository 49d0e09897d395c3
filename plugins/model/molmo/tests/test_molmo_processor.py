"""The processor, compared with the published rules in torch, on images of many sizes."""

from __future__ import annotations

import json
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
from pegboard_model_molmo.processor import BEGIN, TOKENS, MolmoProcessor
from torch.nn import functional

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.media_peers import ImageContract, image_setup, random_images

SPECIAL = [BEGIN, *TOKENS]
START, END, MARK, COLUMN = range(3, 7)
SIDE = 28
PATCH = 2
GRID = SIDE // PATCH
CONFIG = {
    "model_type": "molmo",
    "vision_backbone": {"image_default_input_size": [SIDE, SIDE], "image_patch_size": PATCH},
}
FILE: dict[str, Any] = {
    "image_processor_type": "MolmoImageProcessor",
    "auto_map": {"AutoImageProcessor": "image_preprocessing_molmo.MolmoImageProcessor"},
    "base_image_input_size": [SIDE, SIDE],
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_padding_mask": True,
    "image_patch_size": PATCH,
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_token_length_h": GRID // 2,
    "image_token_length_w": GRID // 2,
    "max_crops": 12,
    "overlap_margins": [4, 4],
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_entries(kind: str) -> None:
    check_entry(installed_entry(kind, "MolmoForCausalLM"))


def make(folder: Path, config: Mapping[str, Any] = CONFIG, **values: Any) -> MolmoProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps({**FILE, **values}))
    return MolmoProcessor(None, image_setup(folder, config, SPECIAL))


@pytest.fixture(scope="module", params=[(4, 4), (2, 4), (0, 0)], ids=str)
def ours(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MolmoProcessor:
    return make(tmp_path_factory.mktemp("molmo"), overlap_margins=request.param)


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = SPECIAL

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return len(arrays["places"])


def fitted(image: Any, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the image scaled by torch and normalized, and which pixels show it. Of a width of one
    pixel, torch makes something else unless the channels are last."""
    scale = min(
        np.float32(height) / np.float32(image.height), np.float32(width) / np.float32(image.width)
    )
    size = int(np.float32(image.height) * scale), int(np.float32(image.width) * scale)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    scaled = functional.interpolate(pixels, size, mode="bilinear", antialias=True).clamp(0, 1)[0]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    border = (left, width - size[1] - left, top, height - size[0] - top)
    colors = functional.pad(scaled, border).permute(1, 2, 0).numpy()
    shown = functional.pad(torch.ones(size), border).numpy()
    mean, deviation = (np.array(FILE[name], np.float32) for name in ("image_mean", "image_std"))
    return (colors - mean) / deviation, shown


def best_tiling(height: int, width: int, window: int, most: int) -> tuple[int, int]:
    """Return the crops that need the least scaling, in float32 as the published code."""
    shapes = [(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if i * j <= most]
    shapes.sort(key=lambda shape: (shape[0] * shape[1], shape[0]))
    with np.errstate(all="ignore"):
        sizes = np.array(shapes, np.int32) * window
        scales = np.min(sizes.astype(np.float32) / np.array([height, width], np.float32), 1)
    if np.all(scales < 1):
        return shapes[int(np.argmax(scales))]
    return shapes[int(np.argmin(np.where(scales < 1, 10e9, scales)))]


def cut(plane: np.ndarray) -> np.ndarray:
    """[SIDE, SIDE, ...] → [patches, pixels · ...]."""
    blocks = [
        plane[y : y + PATCH, x : x + PATCH].reshape(-1)
        for y in range(0, SIDE, PATCH)
        for x in range(0, SIDE, PATCH)
    ]
    return np.stack(blocks)


def published(
    image: Any, margins: tuple[int, int], most: int
) -> tuple[list[int], np.ndarray, np.ndarray, list[int]]:
    """Return the tokens, patches, shares of patches, and the block of each row. Blocks have their
    numbers crop by crop, and are sorted by their place in the image."""
    left, right = margins
    window = GRID - left - right
    border = (left + right) * PATCH
    rows, columns = best_tiling(image.height - border, image.width - border, window * PATCH, most)
    pixels, shown = fitted(image, rows * window * PATCH + border, columns * window * PATCH + border)
    whole, _ = fitted(image, SIDE, SIDE)
    half = GRID // 2
    crops, shares, blocks = [cut(whole)], [], []
    for row in range(rows):
        for column in range(columns):
            y, x = row * window * PATCH, column * window * PATCH
            crops.append(cut(pixels[y : y + SIDE, x : x + SIDE]))
            shares.append(cut(shown[y : y + SIDE, x : x + SIDE]).mean(1, dtype=np.float32))
            for i in range(half):
                for j in range(half):
                    top, bottom = row and i < left // 2, row < rows - 1 and i >= half - right // 2
                    start, end = (
                        column and j < left // 2,
                        column < columns - 1 and j >= half - right // 2,
                    )
                    if not (top or bottom or start or end):
                        number = len(crops) * half**2 - half**2 + i * half + j
                        place = row * window // 2 + i, column * window // 2 + j
                        blocks.append((place, number))
    shares.append(np.full(GRID**2, -1, np.float32))
    lines = (rows * window + left + right) // 2
    line = [MARK] * ((columns * window + left + right) // 2) + [COLUMN]
    first = [START, *([MARK] * half + [COLUMN]) * half, END]
    places = [*range(half**2), *(number for _, number in sorted(blocks))]
    return [*first, START, *line * lines, END], np.stack(crops), np.stack(shares), places


@given(random_images(), st.sampled_from([None, 1, 5]))
@settings(max_examples=30, deadline=None)
def test_images(ours: MolmoProcessor, image: Any, most: int | None) -> None:
    """Pixels are scaled by another program, so they differ in their last bits."""
    options = {} if most is None else {"max_crops": most}
    if max(image.size) > SIDE * min(image.size):
        with pytest.raises(RequestError, match="at least one is needed on each side"):
            ours.process("image", image, options)
        return
    tokens, crops, shares, places = published(image, ours.crops.margins, most or 12)
    processed = ours.process("image", image, options)
    assert processed.token_ids == tokens
    np.testing.assert_array_equal(processed.is_row, np.array(tokens) == MARK)
    np.testing.assert_allclose(processed.arrays["pixel_values"], crops, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(processed.arrays["masks"], shares)
    assert processed.arrays["places"].tolist() == places
    assert len(places) == tokens.count(MARK)
    kinds = [str(array.dtype) for array in processed.arrays.values()]
    assert kinds == ["float32", "float32", "int64"]


def test_the_placeholder(ours: MolmoProcessor) -> None:
    placeholder = ours.placeholder("image")
    assert (placeholder.text, placeholder.is_first, placeholder.beginning) == ("", True, (2,))
    assert ours.padded([7, 8]) == ours.padded([2, 7, 8]) == [2, 7, 8]
    assert ours.rewritten("User:") == ours.rewritten(" User:") == " User:"


def test_values_that_files_lack(tmp_path: Path) -> None:
    ours = MolmoProcessor(None, image_setup(tmp_path, {}, SPECIAL))
    crops = ours.crops
    assert (crops.side, crops.patch, crops.margins, crops.most) == (336, 14, (4, 4), 12)
    found = ours.process("image", random_image(640, 480), {})
    assert found.arrays["pixel_values"].shape == (7, 576, 588)
    assert (found.token_ids.count(MARK), found.token_ids.count(COLUMN)) == (144 + 28 * 20, 32)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        ((9, 9), {"sharpen": 2}, "sharpen; Molmo takes max_crops"),
        ((9, 9), {"max_crops": 0}, "max_crops=0; expected a whole number from 1 to 64"),
        ((9, 9), {"max_crops": True}, "max_crops=True; expected a whole number"),
        ((3000, 2), {}, "an image of 3000 × 2 pixels becomes .* × 0 pixels"),
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
        ({"image_patch_size": 16}, "image_patch_size=16; only 2 is supported"),
        ({"image_token_length_h": 9}, "image_token_length_h=9; only 7"),
        ({"image_padding_mask": False}, "image_padding_mask=False; only True"),
        ({"base_image_input_size": [28, 30]}, "28 × 30 pixels; expected the same height"),
        ({"base_image_input_size": 56}, "base_image_input_size=56; the tower takes 28"),
        ({"overlap_margins": [3, 4]}, r"overlap_margins=\[3, 4\]; expected two even numbers"),
        ({"overlap_margins": [8, 6]}, "together less than 14"),
        ({"overlap_margins": 4}, "overlap_margins=4; expected two even numbers"),
        ({"max_crops": "12"}, "max_crops='12'; expected a whole number"),
        ({"image_mean": [0.5]}, r"image_mean=\[0.5\]; expected three numbers"),
        ({"image_std": [1, 1, 0]}, r"image_std=\[1, 1, 0\]; expected three numbers that"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_mlp_activations": "gelu"}, "image_mlp_activations='gelu'; only 'quick_gelu'"),
        ({"image_num_heads": 15}, "image_num_heads=15; expected a divisor of image_emb_dim=1024"),
        ({"image_patch_size": 0}, "image_patch_size=0; expected a whole number"),
        ({"image_default_input_size": [14, 14]}, "crops of 14 pixels a side; expected a multiple"),
        ({"image_num_pos": 577}, "image_num_pos=577; only 197 is supported"),
        ({"image_default_input_size": "x"}, "crops of 'x' pixels; expected two whole numbers"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    config = {**CONFIG, "vision_backbone": {**CONFIG["vision_backbone"], **values}}
    with pytest.raises(ModelError, match=message):
        make(tmp_path, config)


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_molmo.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
