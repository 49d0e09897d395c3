"""The processor of SigLIP, compared with that of transformers, on images of many sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_clip.processor import SiglipProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import PlacedItem
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.media_peers import ImageContract, image_setup, random_images

SIDE = 16
LENGTH = 6
PAD = 2
CONFIG = {
    "text_config": {"max_position_embeddings": LENGTH, "pad_token_id": 9},
    "vision_config": {"image_size": SIDE, "patch_size": 4},
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "SiglipModel"))


def their_images() -> Any:
    return SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})


def make(folder: Path, tokenizer: Any = None, **config: Any) -> SiglipProcessor:
    """tokenizer: the values of tokenizer_config.json."""
    their_images().save_pretrained(folder)
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return SiglipProcessor(None, image_setup(folder, {**CONFIG, **config}, ["<b>"]))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> SiglipProcessor:
    return make(tmp_path_factory.mktemp("siglip"))


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = ["<b>"]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return 1


@given(random_images())
@settings(max_examples=25, deadline=None)
def test_images(ours: SiglipProcessor, image: Any) -> None:
    expected = their_images()([image], return_tensors="np")["pixel_values"][0]
    processed = ours.process("image", image, {})
    np.testing.assert_array_equal(processed.arrays["pixel_values"], expected)
    assert len(processed.token_ids) == 1


@given(st.lists(st.integers(0, 20), max_size=LENGTH))
def test_texts_have_one_length(ours: SiglipProcessor, token_ids: list[int]) -> None:
    assert ours.padded(token_ids) == [*token_ids, *[9] * (LENGTH - len(token_ids))]


@pytest.mark.parametrize(
    ("tokenizer", "padded"),
    [
        ({"pad_token": "<b>"}, [1, PAD, PAD, PAD, PAD, PAD]),
        ({"pad_token": {"content": "<b>"}}, [1, PAD, PAD, PAD, PAD, PAD]),
        ({"pad_token": "<b>", "padding_side": "left"}, [PAD, PAD, PAD, PAD, PAD, 1]),
        ({"pad_token": None}, [1, 9, 9, 9, 9, 9]),
    ],
)
def test_what_the_tokenizer_says(tmp_path: Path, tokenizer: Any, padded: list[int]) -> None:
    assert make(tmp_path, tokenizer).padded([1]) == padded


@pytest.mark.parametrize(
    ("tokenizer", "config", "message"),
    [
        ({"pad_token": "<c>"}, {}, "has no special token '<c>'"),
        ({"padding_side": "top"}, {}, "padding_side='top'; expected 'left' or 'right'"),
        (None, {"text_config": {"pad_token_id": None}}, "pad_token_id=None, and tokenizer_config"),
        (None, {"vision_config": {"vision_use_head": False}}, "vision_use_head=False; expected"),
        (None, {"vision_config": {"model_type": "other"}}, "supported: siglip_vision_model"),
    ],
)
def test_checkpoints_that_are_refused(
    tmp_path: Path, tokenizer: Any, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, tokenizer, **config)


def test_prompts_that_are_refused(ours: SiglipProcessor) -> None:
    with pytest.raises(RequestError, match="1 images and 2 tokens of text; SigLIP makes a vector"):
        ours.inputs([0, 1, 2], [PlacedItem("image", 0, 1, {})])
