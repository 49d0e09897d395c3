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
from pegboard_model_qwen2_audio.processor import SEEN, Qwen2AudioProcessor

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard.interfaces.tokenizer import Tokenizer
from pegboard_media.audio import resample
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import MultiModalProcessorContract
from pegboard_testing.media_peers import image_setup, random_audio, word_tokenizer

MARKS = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
AUDIO = 2
RATE = 16_000
ENCODER = {
    "num_mel_bins": 16,
    "max_source_positions": 100,
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_entries(kind: str) -> None:
    check_entry(installed_entry(kind, "Qwen2AudioForConditionalGeneration"))


def setup_of(folder: Path, **config: Any) -> MultiModalProcessorSetup:
    given_config = {"audio_config": ENCODER, "audio_token_index": AUDIO, **config}
    return image_setup(folder, given_config, MARKS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Qwen2AudioProcessor]:
    """Return transformers' processor and ours, of one checkpoint with items of two seconds."""
    folder = tmp_path_factory.mktemp("qwen2_audio")
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    theirs = transformers.Qwen2AudioProcessor(extractor, word_tokenizer(MARKS))
    theirs.save_pretrained(folder)
    return theirs, Qwen2AudioProcessor(None, setup_of(folder))


@given(
    random_audio(shortest=0.1, longest=2.5), st.sampled_from([RATE, 8_000, 22_050, 44_100, 48_000])
)
@settings(max_examples=40, deadline=None)
def test_audio_of_any_length(pair: Any, samples: np.ndarray, rate: int) -> None:
    theirs, ours = pair
    expected = theirs(
        text=f"a {MARKS[0]} a",
        audio=resample(samples, rate, RATE),
        sampling_rate=RATE,
        return_tensors="np",
    )
    found = ours.process("audio", (samples, rate), {})
    (a,) = theirs.tokenizer.encode("a")
    assert [a, *found.token_ids, a] == expected["input_ids"][0].tolist()
    (count,) = found.arrays["num_frames"].tolist()
    assert count == expected["feature_attention_mask"][0].sum()
    features = found.arrays["input_features"]
    assert features.dtype == np.float32 and features.shape == (16, min(count + SEEN, 200))
    of_all = expected["input_features"][0]
    np.testing.assert_allclose(features, of_all[:, : count + SEEN], rtol=0, atol=1e-4)


@given(random_audio(shortest=0.0001, longest=0.02))
@settings(max_examples=10, deadline=None)
def test_audio_that_is_too_short(pair: Any, samples: np.ndarray) -> None:
    with pytest.raises(RequestError, match=r"frames of 0\.01 seconds; the model takes at least 3"):
        pair[1].process("audio", (samples, RATE), {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"audio_token_index": "a"}, "expected the id of a token"),
        ({"audio_config": {**ENCODER, "num_mel_bins": 0}}, "num_mel_bins=0; expected a whole"),
        (
            {"audio_config": {**ENCODER, "num_mel_bins": 128}},
            "makes 16 mel bins and 200 frames; its audio encoder takes 128 and 200",
        ),
        ({"audio_config": None}, "its audio encoder takes 128 and 3000"),
    ],
)
def test_configs_that_are_wrong(
    pair: Any, tmp_path: Path, config: Mapping[str, Any], message: str
) -> None:
    pair[0].save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        Qwen2AudioProcessor(None, setup_of(tmp_path, **config))


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_qwen2_audio.processor; "
        "assert not {'torch', 'transformers', 'scipy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestContract(MultiModalProcessorContract):
    @pytest.fixture(autouse=True)
    def keep(self, pair: Any) -> None:
        self.pair = pair

    def tokenizer(self) -> Tokenizer:
        return self.pair[0].tokenizer

    def processor(self) -> Qwen2AudioProcessor:
        return self.pair[1]

    def items(self) -> list[tuple[str, Any]]:
        lengths = [700, 16_000, 31_999, 50_000]
        sounds = [np.random.default_rng(n).normal(size=n).astype(np.float32) for n in lengths]
        return [("audio", (samples, 16_000)) for samples in sounds]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return (int(arrays["num_frames"][0]) + 1) // 4
