"""The processor of images of any size, compared with that of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from pegboard_model_llava.processor import LlavaProcessor, llava_processor
from pegboard_model_mistral3.processor import Mistral3Processor
from PIL import Image

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard_models.pixtral_images import PixtralProcessor
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import check_form
from pegboard_testing.media_peers import (
    check_image,
    check_placeholder,
    image_setup,
    pixtral_processor,
    random_images,
    word_tokenizer,
)

MARKS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
PATCH = 5
VISION = {"model_type": "pixtral", "patch_size": PATCH}
CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "mistral3": (Mistral3Processor, 2, {}),
    "mistral3, of three": (Mistral3Processor, 3, {"spatial_merge_size": 3}),
    "llava": (llava_processor, 1, {}),
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "Mistral3ForConditionalGeneration"))


def setup_of(folder: Path, **config: Any) -> MultiModalProcessorSetup:
    return image_setup(folder, {"vision_config": VISION, "image_token_index": 2, **config}, MARKS)


@pytest.fixture(scope="module", params=CASES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return transformers' processor and ours, of one checkpoint."""
    kind, merged, config = CASES[request.param]
    folder = tmp_path_factory.mktemp("pixtral")
    theirs = pixtral_processor(
        word_tokenizer(MARKS), patch_size=PATCH, merged=merged, longest_edge=60
    )
    theirs.save_pretrained(folder)
    return theirs, kind(None, setup_of(folder, **config))


@given(random_images())
@settings(max_examples=40, deadline=None)
def test_images_of_any_size(pair: Any, image: Any) -> None:
    processed = check_image(*pair, "[IMG]", image, is_batched=True)
    size = processed.arrays["pixel_values"].shape[1:]
    check_form(pair[1], "image", processed, {"image_sizes": size})


@pytest.mark.parametrize("size", [[10, 5], [10, 13], [20, 20]])
def test_rows_of_another_size(tmp_path: Path, size: list[int]) -> None:
    transformers.PixtralImageProcessorPil().save_pretrained(tmp_path)
    ours = Mistral3Processor(None, setup_of(tmp_path))
    with pytest.raises(RequestError, match=r"the image has 3 rows; .* multiples of 10, .* got \["):
        ours.place_formed_rows("image", 3, {"image_sizes": np.array(size)})


def test_the_placeholder(pair: Any) -> None:
    check_placeholder(*pair)


def test_the_processor_suits_the_tower(tmp_path: Path) -> None:
    transformers.CLIPImageProcessorPil().save_pretrained(tmp_path)
    clip = {"vision_config": {"model_type": "clip_vision_model"}}
    assert type(llava_processor(None, setup_of(tmp_path, **clip))) is LlavaProcessor
    assert type(llava_processor(None, setup_of(tmp_path))) is PixtralProcessor


def test_other_tokens(tmp_path: Path) -> None:
    """The file names the tokens."""
    transformers.PixtralImageProcessorPil().save_pretrained(tmp_path)
    names = ("image_token", "image_break_token", "image_end_token")
    stored = dict(zip(names, ("[IMG_END]", "a", "[IMG_BREAK]"), strict=True))
    (tmp_path / "processor_config.json").write_text(json.dumps(stored))
    ours = Mistral3Processor(None, setup_of(tmp_path, spatial_merge_size=1))
    assert ours.placeholder("image").text == "[IMG_END]"
    found = ours.process("image", Image.new("RGB", (10, 10)), {})
    assert found.token_ids == [2, 2, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_resize": False}, "its sides must be multiples of 10"),
        ({"patch_size": {"height": 3, "width": 3}}, "mm_processor_kwargs has patch_size"),
        ({"size": {"shortest_edge": 4}}, "could not be processed"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    transformers.PixtralImageProcessorPil().save_pretrained(tmp_path)
    ours = Mistral3Processor(None, setup_of(tmp_path))
    with pytest.raises(RequestError, match=message):
        ours.process("image", Image.new("RGB", (11, 9)), options)


def test_the_size_is_an_option(tmp_path: Path) -> None:
    transformers.PixtralImageProcessorPil().save_pretrained(tmp_path)
    ours = Mistral3Processor(None, setup_of(tmp_path))
    found = ours.process("image", Image.new("RGB", (200, 100)), {"size": {"longest_edge": 40}})
    assert found.arrays["pixel_values"].shape == (3, 20, 40)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_wrong(tmp_path: Path, text: str) -> None:
    transformers.PixtralImageProcessorPil().save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"processor_config\.json"):
        Mistral3Processor(None, setup_of(tmp_path))


def test_a_tokenizer_without_the_tokens(tmp_path: Path) -> None:
    transformers.PixtralImageProcessorPil().save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"image_end_token": "a a"}')
    with pytest.raises(ModelError, match="has no special token 'a a'"):
        Mistral3Processor(None, setup_of(tmp_path))


def test_values_that_a_config_lacks() -> None:
    theirs = transformers.Mistral3Config()
    assert theirs.image_token_index == Mistral3Processor.image_token
    assert theirs.spatial_merge_size == Mistral3Processor.merged


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_mistral3.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
