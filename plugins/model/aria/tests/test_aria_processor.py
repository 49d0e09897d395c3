"""The processor of Aria, compared with those of transformers, on images of many sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_aria.processor import AriaProcessor
from pegboard_model_aria.sizes import IMAGE_TOKEN, QUERIES
from transformers import AriaConfig
from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil
from transformers.models.aria.processing_aria import AriaProcessor as TheirProcessor

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    random_image,
)
from pegboard_testing.media_peers import ImageContract, image_setup, random_images

PATCH = 70
SPECIAL = ["<fim_prefix>", "<|img|>", "<fim_suffix>"]
IMAGE = 3
CONFIG = {
    "vision_config": {"patch_size": PATCH, "image_size": 490},
    "image_token_index": IMAGE,
    "projector_patch_to_query_dict": {"49": 6, "196": 9},
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "AriaForConditionalGeneration"))


def their_images() -> Any:
    return AriaImageProcessorPil(max_image_size=490)


def make(folder: Path, **config: Any) -> AriaProcessor:
    their_images().save_pretrained(folder)
    return AriaProcessor(None, image_setup(folder, {**CONFIG, **config}, SPECIAL))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> AriaProcessor:
    return make(tmp_path_factory.mktemp("aria"))


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = SPECIAL

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return 6 * len(arrays["pixel_values"])


options = st.fixed_dictionaries(
    {}, optional={"max_image_size": st.sampled_from([490, 980]), "split_image": st.booleans()}
)


@given(random_images(), options)
@settings(max_examples=15, deadline=None)
def test_images(ours: AriaProcessor, image: Any, options: dict[str, Any]) -> None:
    """The arrays of transformers' image processor, and as many tokens as its processor has. A patch
    is seen if one of its pixels is."""
    expected = their_images()([image], return_tensors="np", **options)
    found = ours.process("image", image, options)
    np.testing.assert_array_equal(found.arrays["pixel_values"], expected["pixel_values"])
    side = expected["pixel_values"].shape[-1]
    theirs: Any = SimpleNamespace(size_conversion={490: 6, 980: 9}, image_token="<|img|>")
    text = TheirProcessor.replace_image_token(theirs, expected, 0)
    assert list(found.token_ids) == [IMAGE] * text.count("<|img|>")
    grid = side // PATCH
    blocks = expected["pixel_mask"].reshape(-1, grid, PATCH, grid, PATCH).any((2, 4))
    for (height, width), seen in zip(found.arrays["patches"], blocks, strict=True):
        assert seen[:height, :width].all()
        assert seen.sum() == height * width


def test_the_placeholder(ours: AriaProcessor) -> None:
    found = ours.placeholder("image")
    assert (found.text, found.token_ids) == ("".join(SPECIAL), (IMAGE,))


def test_values_that_a_config_lacks() -> None:
    config = AriaConfig()
    assert config.image_token_index == IMAGE_TOKEN
    assert config.projector_patch_to_query_dict == QUERIES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharpen": 2}, "sharpen; the image processor AriaImageProcessorPil takes"),
        ({"max_image_size": 500}, "must be either 490 or 980"),
        ({"max_image_size": 980}, "has 196 patches; the model takes 49. Use another"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    ours = make(tmp_path, projector_patch_to_query_dict={"49": 6})
    with pytest.raises(RequestError, match=message) as caught:
        ours.process("image", random_image(9, 9), options)
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize("queries", [{"a": 3}, {4: 0}, [3], {4: None}])
def test_configs_that_are_refused(tmp_path: Path, queries: Any) -> None:
    with pytest.raises(ModelError, match="expected numbers of rows by numbers of patches"):
        make(tmp_path, projector_patch_to_query_dict=queries)


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_aria.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
