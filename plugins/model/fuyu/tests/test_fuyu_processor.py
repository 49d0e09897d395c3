"""The processor of Fuyu, compared with that of transformers, on images of many sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_fuyu.processor import FuyuProcessor, token_after
from pegboard_model_fuyu.sizes import DEFAULTS, IMAGE_TOKEN, TEXT, patch_of, with_text
from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    random_image,
)
from pegboard_testing.media_peers import (
    ImageContract,
    fuyu_processor,
    image_setup,
    random_images,
    word_tokenizer,
)

PATCH = 10
SIZE = {"height": 60, "width": 90}
SPECIAL = ["|SPEAKER|", "|NEWLINE|", "<s>", "<0x04>"]
IMAGE, NEWLINE, BEGIN, ANSWER = range(2, 6)
CONFIG = {"patch_size": PATCH, "image_token_id": IMAGE}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "FuyuForCausalLM"))


def their_images(**values: Any) -> Any:
    side = {"height": PATCH, "width": PATCH}
    return FuyuImageProcessorPil(**{"size": SIZE, "patch_size": side, **values})


def make(folder: Path, **config: Any) -> FuyuProcessor:
    their_images().save_pretrained(folder)
    return FuyuProcessor(None, image_setup(folder, {**CONFIG, **config}, SPECIAL))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> FuyuProcessor:
    return make(tmp_path_factory.mktemp("fuyu"))


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = SPECIAL
    sizes = ((20, 30), (7, 50), (200, 9))

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return len(arrays["patches"])


options = st.fixed_dictionaries(
    {},
    optional={
        "size": st.sampled_from([SIZE, {"height": 30, "width": 120}]),
        "do_resize": st.just(True),
        "do_normalize": st.booleans(),
        "padding_value": st.sampled_from([0.0, 255.0]),
    },
)


@given(random_images(), options)
@settings(max_examples=25, deadline=None)
def test_images(ours: FuyuProcessor, image: Any, options: dict[str, Any]) -> None:
    """The patches of transformers' processor, and its tokens up to the text."""
    tokenizer = word_tokenizer(SPECIAL)
    theirs = fuyu_processor(their_images(), tokenizer)
    arrays, (text,) = theirs._process_images(
        [image], return_legacy_image_output=False, return_tensors="pt", **options
    )
    found = ours.process("image", image, options)
    np.testing.assert_array_equal(found.arrays["patches"], arrays["pixel_values"].numpy())
    assert list(found.token_ids) == tokenizer.encode(text)
    assert found.is_row is not None
    assert found.is_row.tolist() == [token == IMAGE for token in found.token_ids]


def test_the_placeholder(ours: FuyuProcessor) -> None:
    found = ours.placeholder("image")
    assert (found.text, found.token_ids, found.is_first, found.ending) == ("", (), True, (ANSWER,))


class Spaced:
    """A tokenizer that puts a space before each text, begins with a token, and knows bytes."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        known = {"|NEWLINE|": [9, 5], "<s>": [9, 1], "\x04": [9, 7], "": []}
        return [0] * add_special_tokens + known.get(text, [9, 3, 3, 3])

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return {5: "|NEWLINE|", 1: "<s>", 7: "\x04", 9: " "}.get(ids[0], "?")


def test_the_tokenizer_of_the_published_checkpoint(tmp_path: Path) -> None:
    their_images().save_pretrained(tmp_path)
    setup = image_setup(tmp_path, CONFIG, SPECIAL)
    tokenizer: Any = Spaced()
    ours = FuyuProcessor(None, type(setup)(setup.checkpoint, tokenizer))
    assert (ours.newline, ours.begin, ours.first, ours.ending) == (5, 1, (0,), (7,))
    with pytest.raises(ModelError, match="has no token '<box>'"):
        token_after(tokenizer, ("<box>",))


def test_values_that_a_config_lacks() -> None:
    config = transformers.FuyuConfig(hidden_size=4096)
    text = config.text_config.to_dict()
    theirs = {**text, **text["rope_parameters"]}
    assert {name: theirs[name] for name in TEXT} == TEXT
    assert config.image_token_id == IMAGE_TOKEN
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


def test_values_of_the_language_model_beside_the_others() -> None:
    flat = with_text({"model_type": "fuyu", "hidden_size": 8, "rope_scaling": None})
    assert flat["text_config"] == {**TEXT, "hidden_size": 8, "rope_scaling": None}
    assert with_text({"text_config": {"hidden_size": 3}, "hidden_size": 8})["text_config"] == {
        "hidden_size": 3
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharpen": 2}, "sharpen; the image processor FuyuImageProcessorPil takes"),
        ({"patch_size": {"height": 5, "width": 5}}, "has patch_size; the image processor"),
        ({"size": {"height": 9, "width": 50}}, r"has \d+ × 9 pixels; a patch has 10 × 10. Leave"),
    ],
)
def test_options_that_are_refused(
    ours: FuyuProcessor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ours.process("image", random_image(9, 9), options)
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"patch_size": 0}, "patch_size=0; expected a whole number from 1 on"),
        ({"num_channels": 1}, "num_channels=1; images have 3"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        patch_of(config)


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_fuyu.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
