"""The processor of Audio Flamingo 3, compared with that of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_qwen2_audio.processor import AudioFlamingo3Processor

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard.interfaces.tokenizer import Tokenizer
from pegboard_media.audio import resample
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import MultiModalProcessorContract
from pegboard_testing.media_peers import image_setup, random_audio, word_tokenizer

MARKS = ["<sound>"]
AUDIO = 2
RATE = 16_000
ENCODER = {"num_mel_bins": 16, "max_source_positions": 50}
MAX_SECONDS = 4


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_entries(kind: str) -> None:
    check_entry(installed_entry(kind, "AudioFlamingo3ForConditionalGeneration"))


def setup_of(folder: Path) -> MultiModalProcessorSetup:
    return image_setup(folder, {"audio_config": ENCODER, "audio_token_id": AUDIO}, MARKS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, AudioFlamingo3Processor]:
    """Return transformers' processor and ours, of one checkpoint with windows of a second."""
    folder = tmp_path_factory.mktemp("flamingo")
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    theirs = transformers.AudioFlamingo3Processor(
        extractor, word_tokenizer(MARKS), max_audio_len=MAX_SECONDS
    )
    theirs.save_pretrained(folder)
    return theirs, AudioFlamingo3Processor(None, setup_of(folder))


@given(random_audio(shortest=0.1, longest=5.0), st.sampled_from([RATE, 8_000, 44_100]))
@settings(max_examples=30, deadline=None)
def test_audio_of_any_length(pair: Any, samples: np.ndarray, rate: int) -> None:
    theirs, ours = pair
    expected = theirs(text="a <sound> a", audio=resample(samples, rate, RATE))
    found = ours.process("audio", (samples, rate), {})
    (a,) = theirs.tokenizer.encode("a")
    assert [a, *found.token_ids, a] == expected["input_ids"][0].tolist()
    counts = expected["input_features_mask"].sum(-1).tolist()
    assert found.arrays["num_frames"].tolist() == counts
    features = found.arrays["input_features"]
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected["input_features"].numpy(), rtol=0, atol=1e-4)


def test_audio_that_is_too_short(pair: Any) -> None:
    with pytest.raises(RequestError, match=r"has 2 frames of 0\.01 seconds; the model takes at"):
        pair[1].process("audio", (np.zeros(320, np.float32), RATE), {})


@pytest.mark.parametrize("seconds", [0, "a", 1.5])
def test_a_length_that_is_wrong(pair: Any, tmp_path: Path, seconds: Any) -> None:
    pair[0].save_pretrained(tmp_path)
    path = tmp_path / "processor_config.json"
    values = {**json.loads(path.read_text()), "max_audio_len": seconds}
    path.write_text(json.dumps(values))
    with pytest.raises(ModelError, match=f"max_audio_len={seconds!r}; expected a whole number"):
        AudioFlamingo3Processor(None, setup_of(tmp_path))


class TestContract(MultiModalProcessorContract):
    @pytest.fixture(autouse=True)
    def keep(self, pair: Any) -> None:
        self.pair = pair

    def tokenizer(self) -> Tokenizer:
        return self.pair[0].tokenizer

    def processor(self) -> AudioFlamingo3Processor:
        return self.pair[1]

    def items(self) -> list[tuple[str, Any]]:
        lengths = [700, 16_000, 31_999, 90_000]
        sounds = [np.random.default_rng(n).normal(size=n).astype(np.float32) for n in lengths]
        return [("audio", (samples, RATE)) for samples in sounds]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return sum((int(count) + 1) // 4 for count in arrays["num_frames"])
