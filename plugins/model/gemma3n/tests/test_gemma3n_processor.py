"""The processor of Gemma 3n, compared with that of transformers, on images of many sizes and on
audio of many lengths and rates."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_gemma3n import sizes
from pegboard_model_gemma3n.features import COUNTS, FLAGS, LONGEST, NUMBERS, MelFeatures
from pegboard_model_gemma3n.media import Gemma3nMedia, whole_config
from pegboard_model_gemma3n.processor import Gemma3nProcessor
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
from transformers.models.gemma3n.processing_gemma3n import Gemma3nProcessor as TheirProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard_media.audio import resample
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    MultiModalProcessorContract,
    random_image,
)
from pegboard_testing.fake_build import fake_build, load_layers
from pegboard_testing.media_peers import image_setup, random_audio, random_images, word_tokenizer

RATE = 16_000
SIDE = 24
BINS = 12
SPECIAL = [
    "<start_of_image>",
    "<start_of_audio>",
    "<end_of_image>",
    "<image_soft_token>",
    "<end_of_audio>",
    "<audio_soft_token>",
]
TOKENS = {"boi": 2, "boa": 3, "eoi": 4, "image": 5, "eoa": 6, "audio": 7}
AUDIO = {"input_feat_size": BINS, "hidden_size": 24, "conf_num_attention_heads": 3}
CONFIG: dict[str, Any] = {
    "audio_config": AUDIO,
    "vision_config": {"architecture": "mobilenetv5_300m_enc"},
    **{f"{name}_token_id": token for name, token in TOKENS.items()},
}


def test_contract() -> None:
    check_entry(installed_entry("multimodal_processor", "Gemma3nForConditionalGeneration"))


class TheirImages(TheirProcessor):  # type: ignore[misc]
    """Transformers' processor, which wants an image processor of tensors."""

    def check_argument_for_proper_class(self, *given: Any) -> Any:
        return None


def their_processor(**extractor: Any) -> Any:
    tokenizer = word_tokenizer(SPECIAL)
    for place, name in enumerate(TOKENS):
        setattr(tokenizer, f"{name}_token", SPECIAL[place])
        setattr(tokenizer, f"{name}_token_id", TOKENS[name])
    return TheirImages(
        Gemma3nAudioFeatureExtractor(**{"feature_size": BINS, **extractor}),
        SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_normalize=False),
        tokenizer,
    )


def setup_of(folder: Path, **config: Any) -> MultiModalProcessorSetup:
    theirs = their_processor()
    values = {
        "feature_extractor": theirs.feature_extractor.to_dict(),
        "image_processor": theirs.image_processor.to_dict(),
    }
    path = folder / "processor_config.json"
    if not path.exists():
        path.write_text(json.dumps(values, default=lambda value: value.tolist()))
    return image_setup(folder, {**CONFIG, **config}, SPECIAL)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Gemma3nProcessor]:
    """Return transformers' processor and ours, of one checkpoint."""
    folder = tmp_path_factory.mktemp("gemma3n")
    return their_processor(), Gemma3nProcessor(None, setup_of(folder))


class TestContract(MultiModalProcessorContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def tokenizer(self) -> Any:
        return setup_of(self.path).tokenizer

    def processor(self) -> Gemma3nProcessor:
        return Gemma3nProcessor(None, setup_of(self.path))

    def items(self) -> list[tuple[str, Any]]:
        sides = ((20, 30), (7, 50), (9, 9))
        lengths = [700, 16_000, 50_000]
        noise = [np.random.default_rng(n).normal(size=n).astype(np.float32) for n in lengths]
        return [("image", random_image(*size)) for size in sides] + [
            ("audio", (samples, RATE)) for samples in noise
        ]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return 256 if modality == "image" else 188


@given(random_images())
@settings(max_examples=15, deadline=None)
def test_images(pair: Any, image: Any) -> None:
    theirs, ours = pair
    expected = theirs(images=image, text="a <image_soft_token> a", return_tensors="np")
    processed = ours.process("image", image, {})
    pixels = processed.arrays["pixel_values"]
    assert pixels.dtype == np.float32
    np.testing.assert_array_equal(pixels, expected["pixel_values"][0])
    (a,) = theirs.tokenizer.encode("a")
    assert [a, *processed.token_ids, a] == expected["input_ids"][0].tolist()
    assert processed.is_row.tolist() == [token == 5 for token in processed.token_ids]


@given(
    random_audio(shortest=0.11, longest=2.5),
    st.sampled_from([RATE, 8_000, 22_050, 44_100, 48_000]),
)
@settings(max_examples=25, deadline=None)
def test_audio_of_any_length(pair: Any, samples: np.ndarray, rate: int) -> None:
    theirs, ours = pair
    expected = theirs(
        text="a <audio_soft_token> a",
        audio=[resample(samples, rate, RATE)],
        return_tensors="np",
    )
    processed = ours.process("audio", (samples, rate), {})
    (a,) = theirs.tokenizer.encode("a")
    assert [a, *processed.token_ids, a] == expected["input_ids"][0].tolist()
    features = processed.arrays["input_features"]
    assert features.dtype == np.float32 and expected["input_features_mask"].all()
    np.testing.assert_allclose(features, expected["input_features"][0], rtol=0, atol=1e-4)


def test_long_audio_is_cut(pair: Any) -> None:
    samples = np.random.default_rng(1).normal(size=LONGEST + 900).astype(np.float32)
    theirs = pair[0].feature_extractor([samples], return_tensors="np")["input_features"][0]
    features = pair[1].process("audio", (samples, RATE), {}).arrays["input_features"]
    np.testing.assert_allclose(features, theirs, rtol=0, atol=1e-4)


@given(random_audio(shortest=0.0001, longest=512 / RATE))
@settings(max_examples=10, deadline=None)
def test_audio_that_is_too_short(pair: Any, samples: np.ndarray) -> None:
    with pytest.raises(RequestError, match="samples, at 16000 a second; the model takes at least"):
        pair[1].process("audio", (samples, RATE), {})


def test_the_shortest_audio(pair: Any) -> None:
    samples = np.zeros(pair[1].features.least, np.float32)
    assert len(pair[1].process("audio", (samples, RATE), {}).arrays["input_features"]) == 1


def mel_of(folder: Path, values: Mapping[str, Any]) -> MelFeatures:
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return MelFeatures(image_setup(folder, {}, []).checkpoint)


OPTIONS: dict[str, dict[str, Any]] = {
    "no emphasis": {"preemphasis": 0.0, "input_scale_factor": 3.0},
    "another emphasis": {"preemphasis_htk_flavor": False, "preemphasis": 0.5},
    "another transform": {"fft_overdrive": False, "mel_floor": 0.1, "padding_value": 0.3},
    "other frames": {"frame_length_ms": 20.0, "hop_length_ms": 7.5, "sampling_rate": 8_000},
    "other bins": {"min_frequency": 0.0, "max_frequency": 3000.0, "feature_size": 40},
    "a scale for each bin": {
        "per_bin_mean": [0.5 * n for n in range(BINS)],
        "per_bin_stddev": [1.0 + n for n in range(BINS)],
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_what_the_file_says(tmp_path: Path, options: dict[str, Any]) -> None:
    values = {"feature_size": BINS, **options}
    theirs = Gemma3nAudioFeatureExtractor(**values)
    ours = mel_of(tmp_path, values)
    for length in (700, 9_001):
        samples = np.random.default_rng(length).normal(size=length).astype(np.float32)
        expected = theirs([samples], return_tensors="np")["input_features"][0]
        features = ours(samples)
        assert len(features) == ours.num_frames(length)
        np.testing.assert_allclose(features, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dither": 0.1}, r"has {'dither': 0.1}; expected numbers, of which"),
        ({"mel_floor": 0}, "mel_floor is above 0"),
        ({"min_frequency": 9000.0}, "max_frequency is above min_frequency"),
        ({"preemphasis": "a"}, "'preemphasis': 'a'"),
        ({"fft_overdrive": 1}, "'fft_overdrive': 1"),
        ({"padding_side": "left"}, 'padding_side="right"'),
        ({"feature_size": 0}, "feature_size=0; expected a whole number from 1 on"),
        ({"frame_length_ms": 0.0}, "frames of 0 samples"),
        ({"per_bin_mean": [1.0]}, "per_bin_mean=.*; expected 128 numbers"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        mel_of(tmp_path, values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"audio_token_id": "a"}, "expected the id of a token"),
        ({"boa_token_id": 9}, "has <start_of_audio> as token 3, and its config says 9"),
        ({"audio_config": {**AUDIO, "input_feat_size": 8}}, "makes 12 mel bins; its audio encoder"),
        ({"audio_soft_tokens_per_image": 187}, "makes up to 188 rows; expected at most"),
        ({"audio_soft_tokens_per_image": 0}, "audio_soft_tokens_per_image=0; expected a whole"),
        ({"vision_soft_tokens_per_image": 64}, "=64; the vision tower makes 256 rows"),
        ({"vision_config": {"architecture": "resnet50"}}, "architecture='resnet50'; the plugin"),
        ({"vision_config": {"hidden_size": 9}}, "hidden_size=9; the plugin has the tower"),
        ({"vision_config": {"model_args": {"depth": 3}}}, "model_args="),
        ({"audio_config": 3}, "audio_config=3; expected an object"),
    ],
)
def test_configs_that_are_wrong(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Gemma3nProcessor(None, setup_of(tmp_path, **config))


def test_a_number_of_tokens_that_the_files_do_not_agree_on(tmp_path: Path) -> None:
    setup_of(tmp_path)
    path = tmp_path / "processor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "audio_seq_length": 9}))
    with pytest.raises(ModelError, match="audio_seq_length=9, and the checkpoint's config has"):
        Gemma3nProcessor(None, setup_of(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 25}, "an even multiple of conf_num_attention_heads=3"),
        ({"conf_attention_context_right": -1}, "right=-1; expected a whole number from 0 on"),
        ({"conf_attention_logit_cap": 0}, "logit_cap=0; expected a number above 0"),
        ({"conf_conv_kernel_size": 0}, "kernel_size=0; expected a whole number"),
        ({"sscp_conv_kernel_size": [[3, 3]]}, "the channels of two convolutions"),
        ({"sscp_conv_stride_size": [[2, 2], [2, 0]]}, "the channels of two convolutions"),
        ({"sscp_conv_channel_size": 3}, "the channels of two convolutions"),
        ({"sscp_conv_kernel_size": [[3, 9], [3, 9]]}, "less than its convolutions take"),
    ],
)
def test_encoders_that_are_wrong(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        sizes.AudioSizes.of({"audio_config": {**AUDIO, **values}})


def test_tokens_without_an_embedding() -> None:
    text = {"hidden_size": 16, "vocab_size": 262_500}
    config = whole_config({**CONFIG, "text_config": text})
    shape = SimpleNamespace(layer_size=4)
    language = SimpleNamespace(layer_tables=None, known=None, shape=shape)
    build = fake_build(models=lambda config, build: language)
    with pytest.raises(ModelError, match="expected those up to 262499. Correct vocab_size"):
        Gemma3nMedia(config, build)


@pytest.mark.parametrize("names", [("model.embed_audio.embedding.weight",), ("embed_audio.a",)])
def test_a_checkpoint_that_only_listens(tmp_path: Path, names: tuple[str, ...]) -> None:
    setup = setup_of(tmp_path)
    tensors: Any = dict.fromkeys(names)
    checkpoint = SimpleNamespace(
        **{name: getattr(setup.checkpoint, name) for name in ("config", "path")}
    )
    checkpoint.tensors = tensors
    given_setup: Any = SimpleNamespace(checkpoint=checkpoint, tokenizer=setup.tokenizer)
    processor = Gemma3nProcessor(None, given_setup)
    assert processor.placeholder("image").token_ids == (5,)
    with pytest.raises(RequestError, match="modality image; it reads text and audio. Leave"):
        processor.process("image", random_image(3, 3), {})


def test_values_that_a_config_lacks() -> None:
    theirs = transformers.Gemma3nConfig()
    for name, token in sizes.TOKENS.items():
        assert getattr(theirs, f"{name}_token_id") == token
    assert theirs.to_dict().items() >= sizes.SOFT_TOKENS.items()
    audio = theirs.audio_config.to_dict()
    assert audio.items() >= {**sizes.AUDIO, **sizes.CONTEXT, **sizes.FACTORS}.items()
    plain = json.loads(json.dumps({name: audio[name] for name in sizes.CONVOLUTIONS}))
    assert plain == sizes.CONVOLUTIONS
    for part, config in (("vision", theirs.vision_config), ("audio", theirs.audio_config)):
        embedded = sizes.Embedded.of({}, part)
        assert embedded.size == config.hidden_size and embedded.eps == config.rms_norm_eps
        assert (embedded.start, embedded.count) == (config.vocab_offset, config.vocab_size)
    assert theirs.vision_config.architecture == sizes.ARCHITECTURE
    extractor = Gemma3nAudioFeatureExtractor()
    for name, value in {**COUNTS, **FLAGS, **NUMBERS}.items():
        if not name.endswith("_ms"):
            assert getattr(extractor, name) == value
    assert (extractor.frame_length, extractor.hop_length) == (512, 160)


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_gemma3n.processor; "
        "assert not {'torch', 'transformers', 'scipy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_frames_and_rows_fit() -> None:
    """The encoder makes as many rows as the processor expects."""
    from pegboard_model_gemma3n.audio import Subsampling

    given_sizes = sizes.AudioSizes.of({"audio_config": AUDIO})
    for count in (1, 2, 7, 33):
        frames = torch.zeros(1, count, BINS)
        inputs = 1
        for convolution in given_sizes.convolutions:
            build = fake_build()
            layer = Subsampling(build, inputs, convolution, 1e-3)
            shape = (convolution.channels, inputs, *convolution.kernel)
            tensors = {"conv.weight": torch.ones(shape), "norm.weight": torch.ones(shape[0])}
            load_layers(build.declared.layers, tensors)
            frames = layer.forward(frames)
            inputs = convolution.channels
        assert -(-frames.shape[1] // given_sizes.reduction) == given_sizes.num_rows(count)
        assert frames.shape[2] == given_sizes.bins[1]
