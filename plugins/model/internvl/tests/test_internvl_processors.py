"""The processor, compared with that of transformers, on images of many sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from pegboard_model_internvl.processor import InternVLProcessor
from pegboard_model_internvl.sizes import IMAGE_TOKEN
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.media_peers import (
    check_image,
    check_placeholder,
    image_setup,
    internvl_processor,
    random_images,
    word_tokenizer,
)

SIDE = 20
GRID = 4
SPECIAL = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
VISION = {
    "model_type": "internvl_vision",
    "image_size": [SIDE, SIDE],
    "patch_size": [SIDE // GRID] * 2,
}
CASES: dict[str, tuple[float, dict[str, Any]]] = {
    "tiles": (0.5, {}),
    "all tiles": (0.5, {"max_patches": 6, "min_patches": 3}),
    "merged by four": (0.25, {"max_patches": 4}),
    "whole": (1.0, {"max_patches": 1}),
    "the file turns tiles off": (0.5, {"crop_to_patches": False}),
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "InternVLForConditionalGeneration"))


def images(**more: Any) -> Any:
    return GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, **more)


def setup_of(folder: Path, **config: Any) -> MultiModalProcessorSetup:
    return image_setup(folder, {"vision_config": VISION, "image_token_id": 4, **config}, SPECIAL)


@pytest.fixture(scope="module", params=CASES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return transformers' processor and ours, of one checkpoint."""
    ratio, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("internvl")
    inner = images(**options)
    inner.save_pretrained(folder)
    rows = int((GRID * ratio) ** 2)
    theirs = internvl_processor(inner, word_tokenizer(SPECIAL), rows=rows)
    return theirs, InternVLProcessor(None, setup_of(folder, downsample_ratio=ratio))


@given(random_images())
@settings(max_examples=40, deadline=None)
def test_images_of_any_size(pair: Any, image: Any) -> None:
    check_image(*pair, "<IMG_CONTEXT>", image, is_batched=False)


def test_the_placeholder(pair: Any) -> None:
    check_placeholder(*pair)


@pytest.mark.parametrize(
    ("options", "count"), [({}, 3), ({"crop_to_patches": False}, 1), ({"max_patches": 8}, 9)]
)
def test_options(tmp_path: Path, options: dict[str, Any], count: int) -> None:
    images(max_patches=3).save_pretrained(tmp_path)
    ours = InternVLProcessor(None, setup_of(tmp_path))
    found = ours.process("image", Image.new("RGB", (80, 40)), options)
    assert found.arrays["pixel_values"].shape == (count, 3, SIDE, SIDE)
    assert len(found.token_ids) == 4 * count + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": {"height": 9, "width": 9}}, r"takes \[3, 20, 20\]"),
        ({"tiles": 3}, "mm_processor_kwargs has tiles"),
        ({"max_patches": "a"}, "could not be processed"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    images().save_pretrained(tmp_path)
    ours = InternVLProcessor(None, setup_of(tmp_path))
    with pytest.raises(RequestError, match=message):
        ours.process("image", Image.new("RGB", (31, 29)), options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"downsample_ratio": 0.4}, "downsample_ratio=0.4; expected 1, 0.5"),
        ({"downsample_ratio": 0}, "downsample_ratio=0; expected 1, 0.5"),
        ({"downsample_ratio": 1 / 3}, "cannot be merged by 3"),
        ({"vision_config": {**VISION, "patch_size": [5, 4]}}, "expected equal sides"),
        ({"vision_config": None}, "vision tower is None"),
        ({"image_token_id": "a"}, "expected the id of a token"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    images().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        InternVLProcessor(None, setup_of(tmp_path, **config))


def test_a_tokenizer_without_the_tokens(tmp_path: Path) -> None:
    images().save_pretrained(tmp_path)
    config = {"vision_config": VISION, "image_token_id": 4}
    for special in (["</img>"], []):
        with pytest.raises(ModelError, match="has no special token '<img>'"):
            InternVLProcessor(None, image_setup(tmp_path, config, special))


def test_values_that_a_config_lacks() -> None:
    theirs = transformers.InternVLConfig()
    assert theirs.image_token_id == IMAGE_TOKEN
    assert theirs.downsample_ratio == 0.5


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_internvl.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
