"""Whisper's encoder and features against transformers, for items of many lengths."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder as TheirEncoder

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_models.log_mel import LogMel
from pegboard_models.whisper_encoder import WhisperEncoder
from pegboard_models.whisper_sizes import WhisperSizes
from pegboard_testing.fake_build import fake_build, load_layers

SIZES = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 10,
    "max_source_positions": 30,
}
MAX_FRAMES = 60
POSITIONS = st.integers(1, 30)


@cache
def encoders() -> tuple[Any, WhisperEncoder]:
    """Return transformers' encoder and ours, with the same random weights."""
    torch.manual_seed(3)
    config = WhisperConfig(**SIZES, attn_implementation="eager")
    theirs = TheirEncoder(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    build = fake_build()
    ours = WhisperEncoder(build.at("encoder"), WhisperSizes.of(config.to_dict()))
    tensors = {f"encoder.{name}": value for name, value in theirs.state_dict().items()}
    assert load_layers(build.declared.layers, tensors) == {*tensors}
    return theirs, ours


def mels(counts: list[int], frames: int = MAX_FRAMES) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(sum(counts))
    return [torch.randn(SIZES["num_mel_bins"], frames, generator=random) for _ in counts]


@torch.no_grad()
@given(st.integers(1, 3))
@settings(max_examples=5, deadline=None)
def test_whole_items(count: int) -> None:
    theirs, ours = encoders()
    given_items = mels([30] * count)
    expected = theirs(torch.stack(given_items)).last_hidden_state
    torch.testing.assert_close(torch.stack(ours.forward(given_items)), expected, rtol=0, atol=1e-4)


@torch.no_grad()
@given(st.lists(POSITIONS, min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_masked_items(counts: list[int]) -> None:
    """Features behind the mask are not attended to. The last feature sees the frames after it."""
    theirs, ours = encoders()
    given_items = mels(counts)
    mask = torch.zeros(len(counts), 1, 30, 30)
    for row, count in zip(mask, counts, strict=True):
        row[:, :, count:] = -torch.inf
    seen = hidden_with_mask(theirs, torch.stack(given_items), mask)
    cut = [mel[:, : 2 * count + 2] for mel, count in zip(given_items, counts, strict=True)]
    found = ours.forward(cut, counts)
    for one, expected, count in zip(found, seen, counts, strict=True):
        torch.testing.assert_close(one, expected[:count], rtol=0, atol=1e-4)


@torch.no_grad()
@given(st.lists(POSITIONS, min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_features_behind_the_mask(counts: list[int]) -> None:
    """All features are computed, and attend to the first ones of their item."""
    theirs, ours = encoders()
    given_items = mels([30] * len(counts))
    mask = torch.zeros(len(counts), 1, 30, 30)
    for row, count in zip(mask, counts, strict=True):
        row[:, :, count:] = -torch.inf
    expected = hidden_with_mask(theirs, torch.stack(given_items), mask)
    features = ours.forward(given_items, attended=counts)
    torch.testing.assert_close(torch.stack(features), expected, rtol=0, atol=1e-4)


def hidden_with_mask(theirs: Any, given_items: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the features of transformers' layers with a mask, which its encoder does not take."""
    hidden = torch.nn.functional.gelu(theirs.conv1(given_items))
    hidden = torch.nn.functional.gelu(theirs.conv2(hidden)).transpose(1, 2)
    hidden = hidden + theirs.embed_positions.weight
    for layer in theirs.layers:
        hidden = layer(hidden, mask)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return theirs.layer_norm(hidden)


@torch.no_grad()
@given(st.lists(st.integers(1, MAX_FRAMES), min_size=2, max_size=4))
@settings(max_examples=20, deadline=None)
def test_items_do_not_see_each_other(frames: list[int]) -> None:
    _, ours = encoders()
    given_items = [mels([count], count)[0] for count in frames]
    together = ours.forward(given_items)
    for mel, count, features in zip(given_items, frames, together, strict=True):
        assert features.shape == ((count + 1) // 2, SIZES["d_model"])
        torch.testing.assert_close(ours.forward([mel])[0], features, rtol=0, atol=1e-5)


def test_float16_stays_finite() -> None:
    build = replace(fake_build(), dtype="float16")
    layer = WhisperEncoder(build, WhisperSizes.of(SIZES)).layers[0]
    huge = torch.tensor([1.0, float("inf"), -float("inf")], dtype=torch.float16)
    assert layer.finish(huge).isfinite().all()


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [None, 0, "a", 1.5])
def test_sizes_that_are_wrong(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"audio encoder has {name}={value!r}; expected a whole"):
        WhisperSizes.of({**SIZES, name: value})


def test_sizes() -> None:
    others = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    others |= {"intermediate_size": 40, "num_mel_bins": 10}
    assert WhisperSizes.of(others, {"max_source_positions": 30}) == WhisperSizes.of(SIZES)
    with pytest.raises(ModelError, match="not a multiple of encoder_attention_heads=5"):
        WhisperSizes.of({**SIZES, "encoder_attention_heads": 5})


@st.composite
def sounds(draw: st.DrawFn, longest: int = 40_000, shortest: int = 1) -> np.ndarray:
    """Samples of random lengths: noise that grows and fades."""
    count = draw(st.integers(shortest, longest))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    loudness = draw(st.sampled_from([1e-4, 0.1, 1.0]))
    curve = np.sin(np.linspace(0, 7, count)) * loudness
    return (random.normal(size=count) * curve).astype(np.float32)


@pytest.mark.parametrize("num_bins", [80, 128])
@given(sounds())
@settings(max_examples=15, deadline=None)
def test_features_of_padded_samples(num_bins: int, samples: np.ndarray) -> None:
    theirs = WhisperFeatureExtractor(feature_size=num_bins, chunk_length=2)
    expected = theirs(
        samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="np"
    )
    ours = LogMel(num_bins, seconds=2)
    found = ours(samples, ours.num_samples)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected["input_features"][0], rtol=0, atol=1e-4)
    count = expected["attention_mask"][0].sum()
    assert min(ours.num_frames(samples), ours.num_samples // ours.hop) == count


@given(sounds(shortest=201))
@settings(max_examples=15, deadline=None)
def test_features_of_whole_samples(samples: np.ndarray) -> None:
    theirs = WhisperFeatureExtractor()
    given_options = {"padding": "do_not_pad", "truncation": False, "sampling_rate": 16_000}
    expected = theirs(samples, **given_options, return_tensors="np")["input_features"][0]
    np.testing.assert_allclose(LogMel()(samples), expected, rtol=0, atol=1e-4)


def checkpoint_of(folder: Path) -> Checkpoint:
    return Checkpoint(
        format="safetensors", path=folder, config={}, architectures=(), tensors={}, tokenizer=None
    )


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_either_file(tmp_path: Path, name: str) -> None:
    WhisperFeatureExtractor(feature_size=128, chunk_length=7).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    stored = written if name.startswith("pre") else {"feature_extractor": written}
    (tmp_path / name).write_text(json.dumps(stored))
    assert LogMel.of(checkpoint_of(tmp_path)) == LogMel(128, seconds=7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "neither preprocessor_config.json nor"),
        ("{", "is not JSON"),
        ("[]", "has list; expected an object"),
        ('{"hop_length": 0}', "has hop_length=0; expected a whole number"),
        ('{"feature_size": "a"}', "has feature_size='a'; expected a whole number"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        LogMel.of(checkpoint_of(tmp_path))


def test_the_modules_are_light() -> None:
    code = (
        "import sys, pegboard_models.log_mel, pegboard_models.whisper_sizes; "
        "assert not {'torch', 'transformers', 'scipy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
