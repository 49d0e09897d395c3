"""The processors, compared with those of transformers, on images of many sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from pegboard_model_gemma_vision.gemma3 import Gemma3Vision
from pegboard_model_gemma_vision.processor import Gemma3Processor, PaliGemmaProcessor
from pegboard_model_gemma_vision.sizes import pooled_side, sizes_of
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor as TheirGemma3
from transformers.models.paligemma.processing_paligemma import (
    PaliGemmaProcessor as TheirPaliGemma,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build
from pegboard_testing.media_peers import (
    check_placeholder,
    image_setup,
    random_images,
    word_tokenizer,
)

SIDE = 24
GRID = 6
SIZE = {"height": SIDE, "width": SIDE}
VISION = {"model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": SIDE // GRID}
MARKS = ["<start_of_image>", "<image_soft_token>", "<end_of_image>", "\n\n"]
PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 10,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
@pytest.mark.parametrize("family", ["Gemma3", "PaliGemma"])
def test_contract(kind: str, family: str) -> None:
    check_entry(installed_entry(kind, f"{family}ForConditionalGeneration"))


def gemma3_setup(folder: Path, **config: Any) -> MultiModalProcessorSetup:
    values = {
        "vision_config": VISION,
        "boi_token_index": 2,
        "image_token_index": 3,
        "mm_tokens_per_image": 9,
    }
    return image_setup(folder, {**values, **config}, MARKS)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Gemma3Processor]:
    """Return transformers' processor and ours, of one checkpoint."""
    folder = tmp_path_factory.mktemp("gemma3")
    tokenizer = word_tokenizer(MARKS)
    tokenizer._set_model_specific_special_tokens(
        {"boi_token": MARKS[0], "image_token": MARKS[1], "eoi_token": MARKS[2]}
    )
    images = Gemma3ImageProcessorPil(size=SIZE)
    theirs = TheirGemma3(image_processor=images, tokenizer=tokenizer, image_seq_length=9)
    theirs.save_pretrained(folder)
    return theirs, Gemma3Processor(None, gemma3_setup(folder))


@pytest.mark.parametrize("options", [{}, PAN_AND_SCAN, {**PAN_AND_SCAN, "do_pan_and_scan": False}])
@given(image=random_images())
@settings(max_examples=30, deadline=None)
def test_gemma3(gemma3: tuple[Any, Gemma3Processor], options: dict[str, Any], image: Any) -> None:
    theirs, ours = gemma3
    expected = theirs(images=image, text=f"a {MARKS[0]} a", return_tensors="np", **options)
    found = ours.process("image", image, options)
    np.testing.assert_array_equal(found.arrays["pixel_values"], expected["pixel_values"])
    assert [1, *found.token_ids, 1] == expected["input_ids"][0].tolist()
    assert found.is_row is not None
    assert [0, *found.is_row.tolist(), 0] == expected["token_type_ids"][0].tolist()


def test_the_placeholder_of_gemma3(gemma3: tuple[Any, Gemma3Processor]) -> None:
    check_placeholder(*gemma3)


@pytest.fixture(scope="module")
def paligemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, PaliGemmaProcessor]:
    folder = tmp_path_factory.mktemp("paligemma")
    special = ["<image>", "<bos>", "\n"]
    tokenizer = word_tokenizer(special)
    tokenizer.bos_token = "<bos>"
    images = SiglipImageProcessorPil(size=SIZE)
    images.image_seq_length = GRID * GRID
    theirs = TheirPaliGemma(image_processor=images, tokenizer=tokenizer)
    theirs.save_pretrained(folder)
    config = {"vision_config": VISION, "image_token_index": 2}
    return theirs, PaliGemmaProcessor(None, image_setup(folder, config, special))


@given(image=random_images())
@settings(max_examples=30, deadline=None)
def test_paligemma(paligemma: tuple[Any, PaliGemmaProcessor], image: Any) -> None:
    theirs, ours = paligemma
    expected = theirs(images=image, text="<image>a a", return_tensors="np")
    found = ours.process("image", image, {})
    np.testing.assert_array_equal(found.arrays["pixel_values"], expected["pixel_values"][0])
    assert [*found.token_ids, 1, 1, 4] == expected["input_ids"][0].tolist()
    assert found.is_row is not None and found.is_row.tolist() == [True] * GRID**2 + [False]


def test_the_placeholder_of_paligemma(paligemma: tuple[Any, PaliGemmaProcessor]) -> None:
    check_placeholder(*paligemma)


@pytest.mark.parametrize("options", [{"size": {"height": 9, "width": 9}}, {"crop": 3}])
def test_options_that_are_refused(gemma3: tuple[Any, Gemma3Processor], options: Any) -> None:
    with pytest.raises(RequestError, match=r"takes"):
        gemma3[1].process("image", random_image(31, 29), options)


@pytest.mark.parametrize("rows", [0, 8, 16, 49, "9", None])
def test_rows_that_do_not_fit_the_tower(rows: Any) -> None:
    config = {"vision_config": VISION, "mm_tokens_per_image": rows}
    with pytest.raises(ModelError, match="mm_tokens_per_image=.* the square of a number"):
        pooled_side(config, sizes_of(config))


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    Gemma3ImageProcessorPil(size=SIZE).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has <start_of_image> as token 2, and its config says 7"):
        Gemma3Processor(None, gemma3_setup(tmp_path, boi_token_index=7))


def test_another_tower_is_refused() -> None:
    config = {
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
        "text_config": {"model_type": "gemma3_text", "hidden_size": 8},
    }
    with pytest.raises(ModelError, match="supported: siglip_vision_model"):
        Gemma3Vision(config, fake_build(models=lambda *given: None))
