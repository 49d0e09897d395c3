"""The processor of GLM-4V-9B, compared with the published rules in torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from pegboard_model_glm4v.eva_sizes import POSITION, EvaSizes
from pegboard_model_glm4v.square_processor import SquareProcessor
from PIL import Image

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import PlacedItem
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.media_peers import ImageContract, image_setup, random_images

SPECIAL = ["<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>"]
BEGIN, PAD, END = 2, 3, 4
VISION = {"image_size": 56, "patch_size": 14, "num_positions": 17}
CONFIG = {
    "boi_token_id": BEGIN,
    "pad_token_id": PAD,
    "eoi_token_id": END,
    "vision_config": VISION,
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_entries(kind: str) -> None:
    check_entry(installed_entry(kind, "GLM4VForCausalLM"))


def make(folder: Path, config: Mapping[str, Any] = CONFIG) -> SquareProcessor:
    return SquareProcessor(None, image_setup(folder, config, SPECIAL))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> SquareProcessor:
    return make(tmp_path_factory.mktemp("glm4v_9b"))


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = SPECIAL
    row_counts = (6,)

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return 6


@given(random_images())
@settings(max_examples=30, deadline=None)
def test_images(ours: SquareProcessor, image: Any) -> None:
    """To the bit."""
    scaled = image.resize((56, 56), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(scaled)).permute(2, 0, 1).contiguous().float().div(255)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    processed = ours.process("image", image, {})
    expected = pixels.sub(mean).div(deviation).numpy()
    np.testing.assert_array_equal(processed.arrays["pixel_values"], expected)
    assert processed.arrays["pixel_values"].dtype == np.float32
    assert (processed.token_ids, processed.is_row) == ([BEGIN, *[PAD] * 4, END], None)


def test_the_placeholder(ours: SquareProcessor) -> None:
    placeholder = ours.placeholder("image")
    assert (placeholder.text, placeholder.token_ids) == ("".join(SPECIAL), (BEGIN, PAD, END))


def test_positions(ours: SquareProcessor) -> None:
    """Those of the published code: the tokens of a prompt, one of which stands for all patches."""
    item = [BEGIN, *[PAD] * 4, END]
    token_ids = [9, *item, 9, *item, 9]
    items = [PlacedItem("image", 1, 7, {}), PlacedItem("image", 8, 14, {})]
    moved = ours.inputs(token_ids, items)[POSITION]
    positions = [place + offset for place, offset in enumerate(moved)]
    assert positions == [0, 1, 2, 2, 2, 2, 3, 4, 5, 6, 6, 6, 6, 7, 8]
    assert ours.inputs([7, 8], []) == {POSITION: [0, 0]}


def test_rows_of_clients(ours: SquareProcessor) -> None:
    assert ours.place_rows("image", 6).token_ids == [BEGIN, *[PAD] * 4, END]
    with pytest.raises(RequestError, match="an image has 5 rows; this model's images have 6"):
        ours.place_rows("image", 5)


def test_values_that_a_config_lacks() -> None:
    sizes = EvaSizes.of({})
    vision = sizes.vision
    assert (vision.num_layers, vision.hidden_size, vision.num_heads) == (63, 1792, 16)
    assert (vision.intermediate_size, vision.eps, sizes.factor) == (15360, 1e-6, 8.0)
    assert (vision.num_positions, sizes.num_rows) == (6401, 1602)


def test_there_are_no_options(ours: SquareProcessor) -> None:
    with pytest.raises(RequestError, match="has size; GLM-4V takes none"):
        ours.process("image", random_image(9, 9), {"size": 5})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_size": 70}, "image_size=70; expected a multiple of 2 patches of 14 pixels"),
        ({"num_heads": 15}, "num_heads=15; expected a divisor of hidden_size=1792"),
        ({"num_positions": 6401}, "num_positions=6401; expected 17"),
        ({"in_channels": 1}, "in_channels=1; expected 3"),
        ({"patch_size": 0}, "patch_size=0; expected a whole number from 1 on"),
        ({"scaling_factor": 0}, "scaling_factor=0; expected a positive number"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps='small'; expected a positive number"),
    ],
)
def test_towers_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, {**CONFIG, "vision_config": {**VISION, **values}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"boi_token_id": None}, "boi_token_id=None; expected the id of a token"),
        ({"pad_token_id": -1}, "pad_token_id=-1; expected the id of a token"),
        ({"vision_config": 5}, "vision_config=5; expected an object"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, {**CONFIG, **values})


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_glm4v.square_processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
