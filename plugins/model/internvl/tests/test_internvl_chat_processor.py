"""The processor for InternVL's published form, compared with that of transformers, on images of
many sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_internvl.processor import InternVLChatProcessor
from pegboard_model_internvl.tiles import DEVIATION, MEAN
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    random_image,
)
from pegboard_testing.media_peers import (
    ImageContract,
    check_image,
    image_setup,
    internvl_processor,
    random_images,
    word_tokenizer,
)

SIDE = 20
GRID = 4
ROWS = (GRID // 2) ** 2
SPECIAL = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
CONFIG = {
    "vision_config": {
        "model_type": "intern_vit_6b",
        "image_size": SIDE,
        "patch_size": SIDE // GRID,
    },
    "ps_version": "v2",
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "max_dynamic_patch": 6,
}
LIMITS = {"min_dynamic_patch": "min_patches", "max_dynamic_patch": "max_patches"}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "InternVLChatModel"))


def make(folder: Path, **config: Any) -> InternVLChatProcessor:
    """Return the processor of a folder whose preprocessor_config.json is that of CLIP."""
    CLIPImageProcessorPil().save_pretrained(folder)
    return InternVLChatProcessor(None, image_setup(folder, {**CONFIG, **config}, SPECIAL))


def their_images(**more: Any) -> Any:
    return GotOcr2ImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=MEAN, image_std=DEVIATION, **more
    )


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = SPECIAL

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return ROWS * len(arrays["pixel_values"])


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> InternVLChatProcessor:
    return make(tmp_path_factory.mktemp("internvl"))


@given(random_images())
@settings(max_examples=40, deadline=None)
def test_images_of_any_size(ours: InternVLChatProcessor, image: Any) -> None:
    inner = their_images(crop_to_patches=True, max_patches=6)
    theirs = internvl_processor(inner, word_tokenizer(SPECIAL), rows=ROWS)
    check_image(theirs, ours, "<IMG_CONTEXT>", image, is_batched=False)


options = st.fixed_dictionaries(
    {"min_dynamic_patch": st.integers(1, 3), "max_dynamic_patch": st.integers(3, 9)},
    optional={"use_thumbnail": st.booleans(), "dynamic_image_size": st.booleans()},
)


@given(random_images(), options)
@settings(max_examples=40, deadline=None)
def test_options(ours: InternVLChatProcessor, image: Any, options: dict[str, Any]) -> None:
    limits = {theirs: options[name] for name, theirs in LIMITS.items()}
    is_cut = options.get("dynamic_image_size", True)
    pixels = their_images()([image], crop_to_patches=is_cut, **limits, return_tensors="np")
    expected = pixels["pixel_values"]
    if len(expected) > 1 and not options.get("use_thumbnail", True):
        expected = expected[:-1]
    processed = ours.process("image", image, options)
    np.testing.assert_array_equal(processed.arrays["pixel_values"], expected)
    assert len(processed.token_ids) == ROWS * len(expected) + 2


def tiles_of(image: Any, least: int, most: int) -> list[Any]:
    """Cut an image as the published code describes it: the grid whose shape is nearest to that of
    the image; of two that are as near, the larger one, if the image has more than half its
    pixels."""
    width, height = image.size
    grids = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= columns * rows <= most
    ]
    best, nearest = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        is_large = width * height > 0.5 * SIDE * SIDE * columns * rows
        if distance < nearest or (distance == nearest and is_large):
            best, nearest = (columns, rows), distance
    columns, rows = best
    canvas = image.resize((SIDE * columns, SIDE * rows), Image.Resampling.BICUBIC)
    corners = [(SIDE * column, SIDE * row) for row in range(rows) for column in range(columns)]
    tiles = [canvas.crop((x, y, x + SIDE, y + SIDE)) for x, y in corners]
    whole = [image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)]
    return tiles + (whole if len(tiles) > 1 else [])


@given(random_images(), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_tiles_of_the_published_code(ours: InternVLChatProcessor, image: Any, most: int) -> None:
    colors = np.stack([np.asarray(tile) for tile in tiles_of(image, 1, most)]) / 255
    expected = ((colors - MEAN) / DEVIATION).transpose(0, 3, 1, 2)
    processed = ours.process("image", image, {"max_dynamic_patch": most})
    np.testing.assert_allclose(processed.arrays["pixel_values"], expected, atol=1e-5)


def test_the_values_of_a_config(tmp_path: Path) -> None:
    """They hold unless options change them; without any, an image is one tile."""
    image = random_image(80, 20)
    few = make(tmp_path, max_dynamic_patch=2, use_thumbnail=False)
    assert len(few.process("image", image, {}).arrays["pixel_values"]) == 2
    plain = {"vision_config": CONFIG["vision_config"], "ps_version": "v2"}
    whole = InternVLChatProcessor(None, image_setup(tmp_path, plain, SPECIAL))
    assert len(whole.process("image", image, {}).arrays["pixel_values"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_patches": 3}, "has max_patches; InternVL takes dynamic_image_size, max_dynamic_p"),
        ({"max_dynamic_patch": 0}, "min_dynamic_patch=1 and max_dynamic_patch=0; expected whole"),
        ({"min_dynamic_patch": 7}, "min_dynamic_patch=7 and max_dynamic_patch=6; expected whole"),
        ({"use_thumbnail": 1}, "use_thumbnail=1; expected true or false"),
    ],
)
def test_options_that_are_refused(
    ours: InternVLChatProcessor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ours.process("image", random_image(9, 9), options)
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"min_dynamic_patch": 7}, "config has min_dynamic_patch=7 and max_dynamic_patch=6"),
        ({"dynamic_image_size": "no"}, "dynamic_image_size='no'; expected true or false"),
        ({"downsample_ratio": 1 / 3}, "cannot be merged by 3"),
        ({"ps_version": "v1"}, "ps_version='v1'; expected 'v2'"),
        ({"vision_config": None}, "vision tower is None; supported: intern_vit_6b"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, **config)


def test_a_tokenizer_without_the_tokens(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no special token '<IMG_CONTEXT>'"):
        InternVLChatProcessor(None, image_setup(tmp_path, CONFIG, SPECIAL[:2]))
