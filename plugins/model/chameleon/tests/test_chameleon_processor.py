"""The processor of Chameleon, compared with that of transformers, on images of many sizes."""

from __future__ import annotations

import json
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
from pegboard_model_chameleon.processor import ChameleonProcessor
from pegboard_model_chameleon.sizes import (
    MULTIPLIERS,
    NUMBERS,
    START,
    EncoderSizes,
    hidden_tokens,
    image_tokens,
)
from transformers.models.chameleon.image_processing_pil_chameleon import ChameleonImageProcessorPil
from transformers.models.chameleon.modeling_chameleon import ChameleonImageVocabularyMapping

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    random_image,
)
from pegboard_testing.media_peers import (
    ImageContract,
    check_image,
    check_placeholder,
    image_setup,
    random_images,
    word_tokenizer,
)

SIZE = 16
SPECIAL = ["<image>", "<racm3:break>", "<eoss>", "<reserved08706>", "<other>"]
IMAGE, BEGIN, END, SEPARATOR, OTHER = range(2, 7)
LETTERS = "ABCDEFGHIJ"


def named(code: int) -> str:
    """Return the name of the token of a code."""
    return START + "".join(LETTERS[int(digit)] for digit in str(code)) + "Z"


def config_of(vocabulary: Mapping[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    given = {
        "resolution": SIZE,
        "channel_multiplier": [1, 1, 2],
        "base_channels": 32,
        "num_embeddings": 12,
        **values,
    }
    tokens = {named(code): 50 - code for code in range(12)}
    return {"vq_config": given, "vocabulary_map": vocabulary or {"<image>": IMAGE, **tokens}}


CONFIG = config_of()


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "ChameleonForConditionalGeneration"))


def their_images() -> Any:
    side = {"height": SIZE, "width": SIZE}
    return ChameleonImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=side)


def make(folder: Path, config: Mapping[str, Any] = CONFIG) -> ChameleonProcessor:
    their_images().save_pretrained(folder)
    return ChameleonProcessor(None, image_setup(folder, config, SPECIAL))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> ChameleonProcessor:
    return make(tmp_path_factory.mktemp("chameleon"))


def their_processor() -> Any:
    tokenizer = word_tokenizer(SPECIAL)
    tokenizer.sep_token = "<reserved08706>"
    return transformers.ChameleonProcessor(their_images(), tokenizer, image_seq_length=16)


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = SPECIAL

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return 16


class ForCompletion:
    """Transformers' processor, without the separator at the end."""

    def __init__(self) -> None:
        self.inner = their_processor()
        self.tokenizer = self.inner.tokenizer

    def __call__(self, **given: Any) -> Any:
        return self.inner(**given, return_for_text_completion=True)


@given(random_images())
@settings(max_examples=15, deadline=None)
def test_images(ours: ChameleonProcessor, image: Any) -> None:
    check_image(ForCompletion(), ours, "<image>", image, is_batched=True)


def test_the_placeholder(ours: ChameleonProcessor) -> None:
    """Transformers' processor writes the separator after the prompt."""
    theirs = their_processor()
    check_placeholder(theirs, ours)
    ids = theirs(images=random_image(9, 9), text="<image> a", return_tensors="np")["input_ids"][0]
    assert tuple(ids[-2:].tolist()) == (1, *ours.placeholder("image").ending)


@pytest.mark.parametrize("token", ["<other>", {"content": "<other>"}])
def test_names_of_tokens(tmp_path: Path, token: Any) -> None:
    names = {"sep_token": token, "boi_token": token, "eoi_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")
    ours = make(tmp_path)
    assert (ours.begin, ours.end, ours.separator) == (OTHER, END, OTHER)


@given(st.permutations(range(100, 130)))
def test_tokens_of_codes(ids: list[int]) -> None:
    tokens = {named(code): token for code, token in enumerate(ids)}
    config = config_of({"<image>": 5, "IMG": 6, **tokens}, num_embeddings=len(ids))
    theirs = ChameleonImageVocabularyMapping(config["vocabulary_map"])
    assert image_tokens(config).tolist() == theirs.img2bpe_mapping_tensor.tolist() == ids
    assert hidden_tokens(config, 130) == theirs.image_tokens
    with pytest.raises(ModelError, match="tokens of images from 100 to 129; expected ids below"):
        hidden_tokens(config, 129)


def test_values_that_a_config_lacks() -> None:
    config = transformers.ChameleonConfig().vq_config
    assert (
        NUMBERS.items()
        <= {
            name: value for name, value in config.to_dict().items() if isinstance(value, int)
        }.items()
    )
    assert tuple(config.channel_multiplier) == MULTIPLIERS
    sizes = EncoderSizes.of({})
    assert (sizes.num_rows, sizes.attention, sizes.attends) == (1024, (), True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharpen": 2}, "sharpen; the image processor ChameleonImageProcessorPil takes"),
        ({"crop_size": {"height": 8, "width": 8}}, r"the vision tower takes \[3, 16, 16\]"),
    ],
)
def test_options_that_are_refused(
    ours: ChameleonProcessor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ours.process("image", random_image(9, 9), options)
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"resolution": 0}, "resolution=0; expected a whole number"),
        ({"resolution": 18}, "resolution=18; expected 2 times even"),
        ({"base_channels": 40}, "base_channels=40; expected a multiple of 32"),
        ({"channel_multiplier": []}, r"channel_multiplier=\[\]; expected whole numbers"),
        ({"channel_multiplier": [1, 0.5]}, "expected whole numbers from 1 on"),
        ({"in_channels": 1}, "in_channels=1; expected 3"),
        ({"double_latent": True}, "double_latent=True; expected false"),
        ({"attn_type": "linear"}, "attn_type='linear'; expected 'vanilla' or 'none'"),
        ({"attn_resolutions": [0]}, r"attn_resolutions=\[0\]; expected whole numbers"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, config_of(**values))


@pytest.mark.parametrize("tokens", [None, [1], {"<image>": "2"}])
def test_a_config_without_tokens_is_refused(tmp_path: Path, tokens: Any) -> None:
    with pytest.raises(ModelError, match="has no vocabulary_map"):
        make(tmp_path, {**CONFIG, "vocabulary_map": tokens})


def test_tokens_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no token for code 1 of images, of which there are 2"):
        image_tokens(config_of({named(0): 3, named(7): 4}, num_embeddings=2))
    with pytest.raises(ModelError, match="has no token '<image>'"):
        make(tmp_path, config_of({named(0): 3}))


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_chameleon.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
