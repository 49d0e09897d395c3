"""The processor, compared with the feature extractor of transformers and the published rules."""

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
from pegboard_model_ultravox.processor import UltravoxProcessor

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
FRAMES = 100
ENCODER = {"num_mel_bins": 16, "max_source_positions": FRAMES // 2}
VALUES = {
    "audio_padding": "longest",
    "encoder_ds_factor": 2,
    "stack_factor": 8,
    "audio_placeholder": "<|audio|>",
    "audio_context_size": FRAMES,
    "processor_class": "UltravoxProcessor",
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_entries(kind: str) -> None:
    check_entry(installed_entry(kind, "UltravoxModel"))


def setup_of(folder: Path, **config: Any) -> MultiModalProcessorSetup:
    given_config = {"audio_config": ENCODER, "audio_token_index": AUDIO, **config}
    return image_setup(folder, given_config, MARKS)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> UltravoxProcessor:
    """Return the processor of a checkpoint with chunks of a second."""
    folder = tmp_path_factory.mktemp("ultravox")
    (folder / "processor_config.json").write_text(json.dumps(VALUES))
    return UltravoxProcessor(None, setup_of(folder))


def expected_of(samples: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the mel bins of all chunks after each other, and the number of rows."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=16)
    made = extractor(
        np.pad(samples, (0, max(0, 320 - len(samples)))),
        sampling_rate=RATE,
        padding="longest",
        pad_to_multiple_of=160,
        truncation=False,
        return_attention_mask=True,
        return_tensors="np",
    )
    count = int(made["attention_mask"].sum())
    starts = range(0, count, FRAMES)
    rows = sum(int(np.ceil(min(count - start, FRAMES) / 16)) for start in starts)
    return made["input_features"][0], rows


@given(random_audio(shortest=0.0001, longest=4.5), st.sampled_from([RATE, 8_000, 44_100]))
@settings(max_examples=40, deadline=None)
def test_audio_of_any_length(processor: UltravoxProcessor, samples: np.ndarray, rate: int) -> None:
    features, num_rows = expected_of(resample(samples, rate, RATE))
    processed = processor.process("audio", (samples, rate), {})
    assert processed.token_ids == [AUDIO] * num_rows
    ours = processed.arrays["input_features"]
    assert ours.dtype == np.float32 and ours.shape == features.shape
    np.testing.assert_allclose(ours, features, rtol=0, atol=1e-4)


def test_a_second_is_six_tokens_and_a_quarter(tmp_path: Path) -> None:
    """A chunk of 30 seconds is 187.5 of them, which is rounded up."""
    processor = UltravoxProcessor(None, setup_of(tmp_path, audio_config={}))
    for seconds, count in ((1, 7), (30, 188), (60, 376), (61, 383)):
        silence = np.zeros(seconds * RATE, np.float32)
        assert len(processor.process("audio", (silence, RATE), {}).token_ids) == count


def test_a_file_of_the_feature_extractor_is_read(tmp_path: Path) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, hop_length=80, chunk_length=1)
    extractor.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="makes 16 mel bins and 200 frames"):
        UltravoxProcessor(None, setup_of(tmp_path))


def test_a_token_after_the_vocabulary(tmp_path: Path) -> None:
    processor = UltravoxProcessor(None, setup_of(tmp_path, text_config={"vocab_size": 2}))
    assert processor.placeholder("audio").token_ids == (AUDIO,)
    assert set(processor.process("audio", (np.zeros(9, np.float32), RATE), {}).token_ids) == {0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audio_padding", "max_length"),
        ("encoder_ds_factor", 4),
        ("stack_factor", 2),
        ("audio_placeholder", "AUDIO"),
        ("audio_context_size", None),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({**VALUES, name: value}))
    with pytest.raises(ModelError, match=f"has {name}={value!r}; the checkpoint's config needs"):
        UltravoxProcessor(None, setup_of(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"audio_token_index": -1}, "expected the id of a token"),
        ({"stack_factor": "a"}, "stack_factor='a'; expected a whole number"),
    ],
)
def test_configs_that_are_wrong(tmp_path: Path, config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        UltravoxProcessor(None, setup_of(tmp_path, **config))


def test_options_are_refused(processor: UltravoxProcessor) -> None:
    with pytest.raises(RequestError, match="mm_processor_kwargs has truncation"):
        processor.process("audio", (np.zeros(900, np.float32), RATE), {"truncation": True})


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_ultravox.processor; "
        "assert not {'torch', 'transformers', 'scipy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestContract(MultiModalProcessorContract):
    @pytest.fixture(autouse=True)
    def keep(self, processor: UltravoxProcessor) -> None:
        self.kept = processor

    def tokenizer(self) -> Tokenizer:
        return word_tokenizer(MARKS)

    def processor(self) -> UltravoxProcessor:
        return self.kept

    def items(self) -> list[tuple[str, Any]]:
        lengths = [1, 16_000, 31_999, 50_000]
        sounds = [np.random.default_rng(n).normal(size=n).astype(np.float32) for n in lengths]
        return [("audio", (samples, RATE)) for samples in sounds]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        chunks = divmod(arrays["input_features"].shape[1], FRAMES)
        return chunks[0] * 7 + -(-chunks[1] // 16)
