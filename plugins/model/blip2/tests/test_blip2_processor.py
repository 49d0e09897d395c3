"""The processor of BLIP-2, compared with that of transformers, on images of many sizes."""

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
from pegboard_model_blip2.processor import Blip2Processor
from pegboard_model_blip2.sizes import KIND, check_language, queries_of
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from pegboard.errors import ModelError, RequestError
from pegboard_models.qformer import QFORMER
from pegboard_models.vision_sizes import DEFAULTS
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    random_image,
)
from pegboard_testing.media_peers import ImageContract, image_setup, random_images, word_tokenizer

SIZE = 28
IMAGE = 2
ROWS = 5
CONFIG = {
    "vision_config": {"model_type": KIND, "patch_size": 14, "image_size": SIZE},
    "image_token_index": IMAGE,
    "num_query_tokens": ROWS,
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "Blip2ForConditionalGeneration"))


def their_images() -> Any:
    return BlipImageProcessorPil(size={"height": SIZE, "width": SIZE})


def make(folder: Path, **config: Any) -> Blip2Processor:
    their_images().save_pretrained(folder)
    return Blip2Processor(None, image_setup(folder, {**CONFIG, **config}, ["<image>"]))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Blip2Processor:
    return make(tmp_path_factory.mktemp("blip2"))


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = ["<image>"]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return ROWS


@given(random_images())
@settings(max_examples=15, deadline=None)
def test_images(ours: Blip2Processor, image: Any) -> None:
    """The pixels and tokens of transformers' processor, which writes the image first."""
    tokenizer = word_tokenizer(["<image>"])
    theirs = transformers.Blip2Processor(their_images(), tokenizer, num_query_tokens=ROWS)
    expected = theirs(images=image, text="a a", return_tensors="np")
    processed = ours.process("image", image, {})
    np.testing.assert_array_equal(processed.arrays["pixel_values"], expected["pixel_values"][0])
    assert processed.is_row is None
    text = tokenizer.encode("a a")
    assert [*processed.token_ids, *text] == expected["input_ids"][0].tolist()


def test_the_placeholder(ours: Blip2Processor) -> None:
    placeholder = ours.placeholder("image")
    assert (placeholder.text, placeholder.token_ids, placeholder.is_first) == ("", (), True)


def test_values_that_a_config_lacks() -> None:
    config = transformers.Blip2Config()
    assert DEFAULTS[KIND].items() <= config.vision_config.to_dict().items()
    assert QFORMER.items() <= config.qformer_config.to_dict().items()
    assert queries_of({}) == config.num_query_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharpen": 2}, "sharpen; the image processor BlipImageProcessorPil takes"),
        ({"size": {"height": 14, "width": 14}}, r"the vision tower takes \[3, 28, 28\]"),
    ],
)
def test_options_that_are_refused(
    ours: Blip2Processor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ours.process("image", random_image(9, 9), options)
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_query_tokens": 0}, "num_query_tokens=0; expected a whole number from 1 on"),
        ({"vision_config": {"model_type": "clip"}}, "vision tower is 'clip'; supported: blip_2"),
        ({"vision_config": {"image_size": [224, 224]}}, r"image_size=\[224, 224\]; expected a int"),
        ({"image_token_index": -1}, "image_token_index=-1; expected the id of a token"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, **config)


@pytest.mark.parametrize("text", [{"model_type": "t5"}, {"is_encoder_decoder": True}])
def test_language_models_with_an_encoder_are_refused(text: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="only decoders such as OPT can be served"):
        check_language({"text_config": text})


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_blip2.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
