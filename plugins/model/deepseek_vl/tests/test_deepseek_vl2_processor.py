"""The processor of DeepSeek-VL2, compared with the published procedure, on images of many sizes."""

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
from pegboard_model_deepseek_vl.processor import DeepseekVL2Processor
from PIL import ImageOps

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.deepseek_images import DEVIATION, MEAN, vl2_views
from pegboard_testing.media_peers import ImageContract, image_setup, random_images

SIDE = 20
PATCH = 4
ROWS = 3
"""Of a view's side: 5 patches, two of which are a row."""
IMAGE = 2
CANDIDATES = [
    [SIDE * columns, SIDE * lines] for columns in range(1, 6) for lines in range(1, 6 // columns)
]
VALUES = {
    "candidate_resolutions": CANDIDATES,
    "downsample_ratio": 2,
    "patch_size": PATCH,
    "image_mean": MEAN,
    "image_std": DEVIATION,
    "image_token": "<image>",
    "normalize": True,
    "processor_class": "DeepseekVLV2Processor",
}
CONFIG = {
    "vision_config": {"image_size": SIDE, "patch_size": PATCH, "width": 48, "heads": 4},
    "projector_config": {"input_dim": 48, "n_embed": 32},
    "candidate_resolutions": CANDIDATES,
    "tile_tag": "2D",
    "global_view_pos": "head",
}
SPECIAL = ["<image>"]


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "DeepseekVLV2ForCausalLM"))


def make(
    folder: Path, values: Mapping[str, Any] = VALUES, config: Mapping[str, Any] = CONFIG
) -> DeepseekVL2Processor:
    (folder / "processor_config.json").write_text(json.dumps(values))
    return DeepseekVL2Processor(None, image_setup(folder, config, SPECIAL))


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = SPECIAL

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        below, beside = arrays["tiles"].tolist()
        return ROWS * (ROWS + 1) + 1 + below * ROWS * (beside * ROWS + 1)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> DeepseekVL2Processor:
    return make(tmp_path_factory.mktemp("deepseek_vl2"))


@given(random_images(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_images(ours: DeepseekVL2Processor, image: Any, cropping: bool) -> None:
    """To the bit."""
    expected, (below, beside) = vl2_views(image, SIDE, CANDIDATES, cropping=cropping)
    processed = ours.process("image", image, {} if cropping else {"cropping": False})
    np.testing.assert_array_equal(processed.arrays["pixel_values"], expected)
    assert processed.arrays["tiles"].tolist() == [below, beside]
    num_rows = ROWS * (ROWS + 1) + 1 + (below * ROWS) * (beside * ROWS + 1)
    assert processed.token_ids == [IMAGE] * num_rows and processed.is_row is None


def test_the_published_sizes(tmp_path: Path) -> None:
    """Tiny: 27 patches of a side and half of them rows, 421 rows with one tile."""
    config = {
        "vision_config": {"width": 1152, "patch_size": 14, "layers": 27, "mlp_ratio": 3.7362},
        "projector_config": {"n_embed": 1280},
        "candidate_resolutions": [[384, 384], [384, 768], [768, 384]],
    }
    ours = make(tmp_path, {}, config)
    counts = [len(ours.process("image", random_image(*size), {}).token_ids) for size in SIZES]
    assert counts == [210 + 1 + 210, 210 + 1 + 14 * 29, 210 + 1 + 28 * 15]


SIZES = [(300, 300), (900, 400), (100, 400)]


def test_values_that_files_lack(tmp_path: Path) -> None:
    """The config says the resolutions, and colors are halves."""
    image = random_image(70, 20)
    pixels = make(tmp_path, {}).process("image", image, {}).arrays["pixel_values"]
    assert len(pixels) == 1 + 3
    colors = np.asarray(image.resize((SIDE, 6)))
    top = (SIDE - 6) // 2
    np.testing.assert_allclose(
        pixels[0, :, top : top + 6], colors.transpose(2, 0, 1) / 127.5 - 1, atol=1e-6
    )


def test_colors_that_are_not_normalized(tmp_path: Path) -> None:
    ours = make(tmp_path, {**VALUES, "normalize": False})
    pixels = ours.process("image", random_image(SIDE, SIDE), {}).arrays["pixel_values"]
    assert 0 <= pixels.min() < 0.1 and 0.9 < pixels.max() <= 1


def test_an_image_that_pillow_refuses(
    ours: DeepseekVL2Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions refuse thin ones."""

    def refuse(*given: Any, **more: Any) -> None:
        raise ValueError("height and width must be > 0")

    monkeypatch.setattr(ImageOps, "pad", refuse)
    with pytest.raises(RequestError, match="an image with 1 × 900 pixels could not be processed"):
        ours.process("image", random_image(1, 900), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": False}, "has crop; DeepSeek-VL2 takes cropping"),
        ({"cropping": 0}, "cropping=0; expected true or false"),
    ],
)
def test_options_that_are_refused(
    ours: DeepseekVL2Processor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ours.process("image", random_image(9, 9), options)
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch_size": 16}, "patch_size=16; expected 4, as in its config.json"),
        ({"downsample_ratio": 3}, "downsample_ratio=3; expected 2, as in its config.json"),
        ({"image_mean": [0.5]}, "image_mean=[0.5]; expected three numbers from 0 to 1"),
        ({"image_std": [1, 1, 0]}, "image_std=[1, 1, 0]; expected three positive numbers"),
        ({"normalize": 1}, "normalize=1; expected true or false"),
        ({"image_token": ""}, "image_token=''; expected a text"),
        ({"image_token": "<picture>"}, "has no special token '<picture>'"),
        ({"candidate_resolutions": []}, "expected pairs of multiples of the tower's image_size=20"),
        ({"candidate_resolutions": [[20, 30]]}, "[[20, 30]]; expected pairs of multiples"),
        ({"candidate_resolutions": [[20]]}, "[[20]]; expected pairs"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        make(tmp_path, {**VALUES, **values})


def test_configs_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tile_tag='1D'"):
        make(tmp_path, VALUES, {**CONFIG, "tile_tag": "1D"})


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_deepseek_vl.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
