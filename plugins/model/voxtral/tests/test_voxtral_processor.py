"""The processor, compared with that of transformers, on audio of many lengths and rates."""

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
from pegboard_model_voxtral.processor import VoxtralProcessor

from pegboard.errors import ModelError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard.interfaces.tokenizer import Tokenizer
from pegboard_media.audio import resample
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import MultiModalProcessorContract
from pegboard_testing.media_peers import image_setup, random_audio, word_tokenizer

MARKS = ["[AUDIO]", "[BEGIN_AUDIO]"]
AUDIO = 2
RATE = 16_000
ENCODER = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_mel_bins": 16,
    "max_source_positions": 100,
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_entries(kind: str) -> None:
    check_entry(installed_entry(kind, "VoxtralForConditionalGeneration"))


def setup_of(folder: Path, **config: Any) -> MultiModalProcessorSetup:
    given_config = {"audio_config": ENCODER, "audio_token_id": AUDIO, **config}
    return image_setup(folder, given_config, MARKS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, VoxtralProcessor]:
    """Return transformers' processor, without its tokenizer, which needs a package of its own, and
    ours, of one checkpoint with parts of two seconds."""
    folder = tmp_path_factory.mktemp("voxtral")
    theirs: Any = object.__new__(transformers.VoxtralProcessor)
    theirs.feature_extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    theirs.feature_extractor.save_pretrained(folder)
    return theirs, VoxtralProcessor(None, setup_of(folder))


@given(random_audio(shortest=0.001, longest=7.0), st.sampled_from([RATE, 8_000, 44_100]))
@settings(max_examples=25, deadline=None)
def test_audio_of_any_length(pair: Any, samples: np.ndarray, rate: int) -> None:
    """Each part of two seconds is 200 frames, 100 features and 25 rows."""
    theirs, ours = pair
    options = {**theirs.audio_kwargs, "pad_to_multiple_of": 2 * RATE, "max_source_positions": 200}
    whole = resample(samples, rate, RATE)
    expected = theirs._retrieve_input_features([whole], **options).numpy()
    found = ours.process("audio", (samples, rate), {})
    features = found.arrays["input_features"]
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-4)
    assert found.token_ids == [AUDIO] * (25 * -(-len(whole) // (2 * RATE)))


def test_a_token_that_is_wrong(pair: Any, tmp_path: Path) -> None:
    pair[0].feature_extractor.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="expected the id of a token"):
        VoxtralProcessor(None, setup_of(tmp_path, audio_token_id=-1))


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_voxtral.processor; "
        "assert not {'torch', 'transformers', 'scipy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestContract(MultiModalProcessorContract):
    @pytest.fixture(autouse=True)
    def keep(self, pair: Any) -> None:
        self.own = pair[1]

    def tokenizer(self) -> Tokenizer:
        return word_tokenizer(MARKS)

    def processor(self) -> VoxtralProcessor:
        return self.own

    def items(self) -> list[tuple[str, Any]]:
        lengths = [1, 16_000, 32_000, 50_000]
        sounds = [np.random.default_rng(n).normal(size=n).astype(np.float32) for n in lengths]
        return [("audio", (samples, 16_000)) for samples in sounds]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return 25 * len(arrays["input_features"])
