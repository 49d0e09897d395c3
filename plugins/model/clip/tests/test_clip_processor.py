"""The processor of CLIP, compared with that of transformers, on images of many sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from pegboard_model_clip.processor import ClipProcessor
from pegboard_model_clip.sizes import PROJECTION, TEXT, vision_sizes
from transformers import CLIPConfig, CLIPTextConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import PlacedItem
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    random_image,
)
from pegboard_testing.media_peers import ImageContract, image_setup, random_images

SIDE = 16
CONFIG = {"vision_config": {"image_size": SIDE, "patch_size": 4}}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "CLIPModel"))


def their_images() -> Any:
    return CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )


def make(folder: Path, **config: Any) -> ClipProcessor:
    their_images().save_pretrained(folder)
    return ClipProcessor(None, image_setup(folder, {**CONFIG, **config}, ["<b>"]))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> ClipProcessor:
    return make(tmp_path_factory.mktemp("clip"))


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = ["<b>"]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return 1


@given(random_images())
@settings(max_examples=25, deadline=None)
def test_images(ours: ClipProcessor, image: Any) -> None:
    expected = their_images()([image], return_tensors="np")["pixel_values"][0]
    processed = ours.process("image", image, {})
    np.testing.assert_array_equal(processed.arrays["pixel_values"], expected)
    assert len(processed.token_ids) == 1


def test_prompts(ours: ClipProcessor) -> None:
    items = [PlacedItem("image", 0, 1, {})]
    assert ours.inputs([0], items) == ours.inputs([1, 2, 3], []) == {}
    with pytest.raises(RequestError, match="1 images and 2 tokens of text"):
        ours.inputs([0, 1, 2], items)


def test_values_that_a_config_lacks() -> None:
    text = CLIPTextConfig()
    assert {name: getattr(text, name) for name in TEXT} == TEXT
    assert CLIPConfig().projection_dim == PROJECTION
    assert vision_sizes({}).image_size == CLIPConfig().vision_config.image_size


def test_what_is_refused(tmp_path: Path) -> None:
    ours = make(tmp_path)
    with pytest.raises(RequestError, match="sharpen; the image processor CLIPImageProcessorPil"):
        ours.process("image", random_image(9, 9), {"sharpen": 2})
    with pytest.raises(RequestError, match=r"the vision tower takes \[3, 16, 16\]"):
        ours.process("image", random_image(9, 9), {"crop_size": {"height": 8, "width": 8}})
    with pytest.raises(ModelError, match="supported: clip_vision_model"):
        make(tmp_path, vision_config={"model_type": "other"})


def test_no_torch_is_loaded() -> None:
    command = "import pegboard_model_clip.processor, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
