"""The processor of Phi-4-multimodal: crops of images, features of speech compared with those of
transformers, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_phi4mm.features import Features
from pegboard_model_phi4mm.images import Crops
from pegboard_model_phi4mm.processor import Phi4MMProcessor
from pegboard_model_phi4mm.sizes import AUDIO, VISION, AudioSizes, vision_of
from transformers import Phi4MultimodalConfig
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import (
    Phi4MultimodalFeatureExtractor,
)

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.media_peers import ImageContract, image_setup

RATE = 16_000
SIDE = 28
SPECIAL = ["<|endoftext10|>", "<|endoftext11|>"]
CONFIG: dict[str, Any] = {
    "vision_config": {"image_size": SIDE, "crop_size": SIDE, "patch_size": 7, "image_token_id": 2},
    "audio_config": {"audio_token_id": 3},
}


def make(folder: Path, **config: Any) -> Phi4MMProcessor:
    values = {"dynamic_hd": 6, **Phi4MultimodalFeatureExtractor().to_dict()}
    values.pop("mel_filters", None)
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return Phi4MMProcessor(None, image_setup(folder, {**CONFIG, **config}, SPECIAL))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Phi4MMProcessor:
    return make(tmp_path_factory.mktemp("phi4mm"))


@pytest.mark.parametrize("name", ["Phi4MMForCausalLM", "Phi4MultimodalForCausalLM"])
@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str, name: str) -> None:
    check_entry(installed_entry(kind, name))


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = SPECIAL
    sizes = ((20, 30), (15, 50), (9, 9))

    def items(self) -> list[tuple[str, Any]]:
        sound = np.random.default_rng(1).normal(size=9000).astype(np.float32), RATE
        return [*super().items(), ("audio", sound)]


@given(st.integers(400, 30_000))
@settings(max_examples=20, deadline=None)
def test_features(length: int) -> None:
    samples = np.random.default_rng(length).normal(size=length).astype(np.float32) * 0.1
    theirs = Phi4MultimodalFeatureExtractor()(samples, sampling_rate=RATE, return_tensors="np")
    (expected,) = theirs["audio_input_features"]
    features = Features(80, RATE, 512, 400, 160, 7690)(samples)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected, atol=1e-3, rtol=1e-4)
    assert AudioSizes.of({}).num_rows(len(features)) == theirs["audio_embed_sizes"]


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 12))
def test_shapes(width: int, height: int, most: int) -> None:
    """All crops at full size, or the nearest shape that is allowed."""
    half = np.full(3, 0.5, np.float32)
    crops = Crops(SIDE, 7, 36, half, half, 1 / 255)
    columns, lines = crops.shape(width, height, most)
    whole = -(-width // SIDE), -(-height // SIDE)
    assert columns * lines <= most
    if whole[0] * whole[1] <= most:
        assert (columns, lines) == whole
    else:
        every = [(i, j) for i in range(1, most + 1) for j in range(1, most // i + 1)]
        distance = min(abs(width / height - i / j) for i, j in every)
        assert abs(width / height - columns / lines) == distance


def test_an_image_is_scaled_and_the_rest_is_white(ours: Phi4MMProcessor) -> None:
    processed = ours.process("image", random_image(40, 20, seed=1), {})
    pixels = processed.arrays["pixel_values"]
    assert pixels.shape == (3, SIDE, 2 * SIDE) and processed.arrays["patches"].tolist() == [4, 8]
    tall = ours.process("image", random_image(10, 28, seed=1), {})
    assert tall.arrays["patches"].tolist() == [4, 2]
    assert (tall.arrays["pixel_values"][:, :, 10:] == 1.0).all()
    assert [*processed.token_ids] == [2] * (2 * 5 + 1 + 2 * 3)


def test_fewer_crops(ours: Phi4MMProcessor) -> None:
    image = random_image(3 * SIDE, 2 * SIDE)
    whole, small = (
        ours.process("image", image, options).arrays["pixel_values"].shape
        for options in ({}, {"dynamic_hd": 2})
    )
    assert whole == (3, 2 * SIDE, 3 * SIDE) and small[1] * small[2] <= 2 * SIDE**2


@pytest.mark.parametrize(
    ("modality", "item", "options", "told"),
    [
        ("image", random_image(9, 9), {"dynamic_hd": 7}, "dynamic_hd, the crops"),
        ("image", random_image(9, 9), {"size": 2}, "dynamic_hd, the crops"),
        ("image", random_image(1, 99), {}, "at least 10 on each side"),
        ("audio", (np.zeros(399, np.float32), RATE), {}, "at least 400"),
        ("audio", (np.zeros(999, np.float32), RATE), {"a": 1}, "mm_processor_kwargs has a;"),
    ],
)
def test_items_that_are_refused(
    ours: Phi4MMProcessor, modality: str, item: Any, options: Mapping[str, Any], told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        ours.process(modality, item, options)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"audio_config": {"chunk_size": 18}}, "chunk_size=18; supported: -1"),
        ({"audio_config": {"activation": "gelu"}}, "activation='gelu'"),
        ({"audio_config": {"ext_pw_out_channel": 5}}, "ext_pw_out_channel=5"),
        ({"audio_config": {"time_reduction": 6}}, "time_reduction=6"),
        ({"audio_config": {"num_blocks": 0}}, "num_blocks=0"),
        ({"audio_config": {"input_size": 40}}, "encoder takes 40"),
        ({"vision_config": {"image_size": 28, "crop_size": 14}}, "crop_size=14"),
        ({"vision_config": {"image_size": 42, "crop_size": 42}}, "a multiple of 2 patches"),
        ({"vision_config": 5}, "vision_config=5; expected an object"),
        ({"audio_config": "x"}, "audio_config='x'; expected an object"),
        ({"audio_config": {"audio_token_id": -1}}, "expected the id of a token"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        make(tmp_path, **config)


def test_published_configs_say_less() -> None:
    """Their values are those of transformers."""
    theirs = Phi4MultimodalConfig().to_dict()
    assert VISION.items() <= theirs["vision_config"].items()
    assert AUDIO.items() <= theirs["audio_config"].items()
    published = {"embd_layer": {}, "audio_processor": {"config": {"attention_dim": 512}}}
    assert vision_of(published) == vision_of(theirs)
    assert AudioSizes.of(published).hidden_size == 512


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_phi4mm.processor; "
        "assert not {'torch', 'transformers', 'scipy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
