"""The processor, compared with that of transformers, on audio of many lengths and rates, and
configs that are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_granite_speech.processor import GraniteSpeechProcessor
from pegboard_model_granite_speech.sizes import EncoderSizes, Windows
from transformers.audio_utils import mel_filter_bank
from transformers.models.granite_speech.feature_extraction_granite_speech import (
    GraniteSpeechFeatureExtractor,
)

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard.interfaces.tokenizer import Tokenizer
from pegboard_media.audio import resample
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import MultiModalProcessorContract
from pegboard_testing.media_peers import image_setup, random_audio, word_tokenizer

MARKS = ["<|audio|>"]
AUDIO = 2
RATE = 16_000
VALUES = {"n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 80}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_entries(kind: str) -> None:
    check_entry(installed_entry(kind, "GraniteSpeechForConditionalGeneration"))


def setup_of(
    folder: Path, values: Mapping[str, Any] | None = None, **config: Any
) -> MultiModalProcessorSetup:
    (folder / "preprocessor_config.json").write_text(json.dumps(values or {}))
    return image_setup(folder, {"audio_token_index": AUDIO, **config}, MARKS)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> GraniteSpeechProcessor:
    return GraniteSpeechProcessor(None, setup_of(tmp_path_factory.mktemp("granite")))


def their_features(samples: np.ndarray, values: Mapping[str, int]) -> np.ndarray:
    """Return the features of a MelSpectrogram of torchaudio with its defaults, in transformers'
    form."""
    size = values["n_fft"]
    length = values["win_length"]
    spectrum = torch.stft(
        torch.from_numpy(samples),
        size,
        values["hop_length"],
        length,
        torch.hann_window(length),
        return_complex=True,
    )
    bins = values["n_mels"]
    filters = mel_filter_bank(size // 2 + 1, bins, 0.0, RATE / 2, RATE, norm=None, mel_scale="htk")
    mel = spectrum.abs().square().T @ torch.from_numpy(filters).float()
    logs = mel.clip(min=1e-10).log10()
    logs = torch.maximum(logs, logs.max() - 8.0) / 4 + 1
    return logs[: len(logs) // 2 * 2].reshape(-1, 2 * bins).numpy()


@given(random_audio(shortest=0.1, longest=3.0), st.sampled_from([RATE, 8_000, 44_100]))
@settings(max_examples=25, deadline=None)
def test_audio_of_any_length(own: GraniteSpeechProcessor, samples: np.ndarray, rate: int) -> None:
    counted: Any = object.__new__(GraniteSpeechFeatureExtractor)
    counted.melspec_kwargs = {"hop_length": 160}
    counted.projector_window_size = 15
    counted.projector_downsample_rate = 5
    whole = resample(samples, rate, RATE)
    found = own.process("audio", (samples, rate), {})
    features = found.arrays["input_features"]
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, their_features(whole, VALUES), rtol=0, atol=1e-4)
    (count,) = counted._get_num_audio_features([len(whole)])
    assert found.token_ids == [AUDIO] * count


def test_other_values(tmp_path: Path) -> None:
    values = {"n_fft": 400, "win_length": 320, "hop_length": 100, "n_mels": 20}
    samples = np.random.default_rng(1).normal(size=9_000).astype(np.float32)
    for written in (values, {"melspec_kwargs": values}):
        processor = GraniteSpeechProcessor(None, setup_of(tmp_path, written))
        found = processor.process("audio", (samples, RATE), {}).arrays["input_features"]
        np.testing.assert_allclose(found, their_features(samples, values), rtol=0, atol=1e-4)


@pytest.mark.parametrize("count", [1, 159])
def test_audio_that_is_too_short(own: GraniteSpeechProcessor, count: int) -> None:
    with pytest.raises(RequestError, match=rf"has {count} samples.*takes at least 160"):
        own.process("audio", (np.zeros(count, np.float32), RATE), {})


def test_values_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"preprocessor_config\.json has n_fft='a'; expected"):
        GraniteSpeechProcessor(None, setup_of(tmp_path, {"n_fft": "a"}))
    with pytest.raises(ModelError, match="window_size=15; expected a multiple of downsample_rate"):
        GraniteSpeechProcessor(None, setup_of(tmp_path, downsample_rate=4))
    with pytest.raises(ModelError, match="config has window_size=0; expected a whole number"):
        Windows.of({"window_size": 0})
    with pytest.raises(ModelError, match="context_size=99; expected at most max_pos_emb=9"):
        EncoderSizes.of({"context_size": 99, "max_pos_emb": 9})
    with pytest.raises(ModelError, match="encoder_config has dim_head=0; expected a whole number"):
        EncoderSizes.of({"dim_head": 0})


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_granite_speech.processor; "
        "assert not {'torch', 'transformers', 'scipy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestContract(MultiModalProcessorContract):
    @pytest.fixture(autouse=True)
    def keep(self, own: GraniteSpeechProcessor) -> None:
        self.own = own

    def tokenizer(self) -> Tokenizer:
        return word_tokenizer(MARKS)

    def processor(self) -> GraniteSpeechProcessor:
        return self.own

    def items(self) -> list[tuple[str, Any]]:
        lengths = [160, 16_000, 31_999, 50_000]
        sounds = [np.random.default_rng(n).normal(size=n).astype(np.float32) for n in lengths]
        return [("audio", (samples, 16_000)) for samples in sounds]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return -(-len(arrays["input_features"]) // 15) * 3
