"""Ultravox, Qwen2-Audio and Voxtral in two GGUF files, compared with transformers: configs and
logits."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import test_audio_parity as audio
import test_ultravox_parity as ultravox
from hypothesis import given, settings
from hypothesis import strategies as st
from mmproj_files import round_values, text_parts, write_file
from mmproj_towers import of_towers, whisper
from test_mmproj_parity import ODD, describe, processor_of, settings_of
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    Prompt,
    check_media,
    check_output,
    open_media_llm,
)
from tiny_models import divide
from torch import Tensor

from pegboard import SamplingParams
from pegboard.errors import ModelError
from pegboard_testing.media_peers import random_audio

SIZES = {
    "embedding_length": audio.ENCODER["d_model"],
    "feed_forward_length": audio.ENCODER["encoder_ffn_dim"],
    "block_count": audio.ENCODER["encoder_layers"],
    "attention.head_count": audio.ENCODER["encoder_attention_heads"],
    "num_mel_bins": audio.BINS,
    "projection_dim": MEDIA_TEXT["hidden_size"],
}
MODELS = {"qwen2a": "qwen2_audio", "voxtral": "voxtral", "ultravox": "ultravox"}
"""What transformers calls the models, by the kind of the projector."""
WORDS = {
    "qwen2a": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
    "voxtral": ["[AUDIO]", "[BEGIN_AUDIO]"],
    "ultravox": ["<|audio|>"],
}
"""Tokens of the vocabulary from 100 on."""


@dataclass
class Family:
    """A model, and what its files have. model: with a language model of transformers' names.
    tensors: of the encoder and the projector. sizes: metadata of the encoder."""

    kind: str
    reference: MediaReference
    model: Any
    tensors: Mapping[str, Tensor]
    sizes: dict[str, Any]

    def prompts(self) -> list[Prompt]:
        """Return prompts with no, one and two items."""
        if self.kind == "ultravox":
            return ultravox.some_prompts()
        return audio.some_prompts(MODELS[self.kind])


class Named:
    """A language model with the names that it has inside a model of several parts."""

    def __init__(self, model: Any) -> None:
        self.config = SimpleNamespace(text_config=model.config)
        self.lm_head = model.lm_head
        self.inner = model

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors."""
        tensors = self.inner.state_dict().items()
        return {name.replace("model.", "model.language_model.", 1): each for name, each in tensors}


def made(kind: str, folder: Path, stored: str = "F32") -> Family:
    """Return a model. folder: for files that are not read. stored: the type of matrices."""
    folder.mkdir(exist_ok=True)
    if kind == "ultravox":
        whole = ultravox.write(folder, projector_ln_mid=True)
        encoder, projector, _ = whole.parts
        tensors = {f"audio_tower.{name}": each for name, each in encoder.state_dict().items()}
        tensors |= {f"multi_modal_projector.{name}": each for name, each in projector.items()}
        sizes = {**SIZES, "projector.stack_factor": ultravox.STACK}
        return Family(kind, whole, Named(whole.model), tensors, sizes)
    reference = audio.write(MODELS[kind], folder)
    round_values(reference.model, stored)
    stack = audio.ENCODER["encoder_ffn_dim"] // audio.ENCODER["d_model"]
    more = {"projector.stack_factor": stack} if kind == "voxtral" else {}
    tensors = of_towers(reference.model)
    return Family(kind, reference, reference.model, tensors, {**SIZES, **more})


def write(
    family: Family,
    folder: Path,
    stored: str = "F32",
    *,
    special: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> MediaReference:
    """Write both files, and return the reference with the first one. special: tokens of the
    vocabulary. metadata, tensors: of the tower, beyond those of the model; None leaves one out."""
    words = WORDS[family.kind] if special is None else special
    arch, text, values = text_parts(family.model, words)
    path = folder / "model.gguf"
    write_file(path, arch, text, values, stored)
    keys, parts = whisper(family.tensors, family.kind, family.sizes)
    kept = {key: each for key, each in {**keys, **(metadata or {})}.items() if each is not None}
    changed = {**parts, **(tensors or {})}
    written = {name: each for name, each in changed.items() if each is not None}
    write_file(folder / "mmproj-model.gguf", "clip", kept, written, stored)
    reference = copy(family.reference)
    reference.directory = path
    return reference


CHOSEN: dict[str, dict[str, Any]] = {
    "chunks": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 70},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN.keys())
@pytest.mark.parametrize("kind", MODELS)
def test_logits(tmp_path: Path, kind: str, chosen: dict[str, Any]) -> None:
    family = made(kind, tmp_path / "other")
    reference = write(family, tmp_path)
    check_media(reference, family.prompts(), repeats=2, **settings_of(tmp_path, **chosen))


@pytest.mark.parametrize("kind", ["qwen2a", "voxtral"])
def test_quantized(tmp_path: Path, kind: str) -> None:
    family = made(kind, tmp_path / "other", "Q8_0")
    reference = write(family, tmp_path, "Q8_0")
    check_media(reference, family.prompts(), **settings_of(tmp_path))


@pytest.mark.parametrize("kind", MODELS)
def test_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    divide(monkeypatch, 2, 2)
    family = made(kind, tmp_path / "other")
    check_media(write(family, tmp_path), family.prompts(), **settings_of(tmp_path))


@pytest.mark.parametrize("kind", ["qwen2a", "voxtral"])
def test_a_chat(tmp_path: Path, kind: str) -> None:
    """The template of the file knows only text."""
    family = made(kind, tmp_path / "other")
    reference = write(family, tmp_path)
    samples = audio.tone(4_000, 3)
    content = io.BytesIO()
    soundfile.write(content, samples, audio.RATE, format="WAV", subtype="FLOAT")
    data = base64.b64encode(content.getvalue()).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": "w7 w8"},
    ]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory, **settings_of(tmp_path)) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    one = audio.prompt(MODELS[kind], 1, samples, 7, 8, 3)
    check_output(reference, one, output.outputs[0], 1e-4)


def test_a_vocabulary_without_the_mark_of_ultravox(tmp_path: Path) -> None:
    """Its language models have no token of it, so it is one of text."""
    family = made("ultravox", tmp_path / "other")
    reference = write(family, tmp_path, special=[])
    checkpoint = describe(reference.directory)
    assert checkpoint.config["audio_token_index"] == MEDIA_TEXT["vocab_size"]
    assert processor_of(checkpoint).token == 0


@pytest.fixture(scope="module", params=["qwen2a", "voxtral"])
def processors(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return our processors of the two files, and of the checkpoint that has all files."""
    folder = tmp_path_factory.mktemp("files")
    family = made(request.param, folder / "other")
    ours = processor_of(describe(write(family, folder).directory))
    return ours, audio.processor_of(MODELS[request.param], folder / "other")


@given(samples=random_audio(shortest=0.1, longest=2.5))
@settings(max_examples=20, deadline=None)
def test_arrays(processors: tuple[Any, Any], samples: np.ndarray) -> None:
    """Those of a checkpoint, which are compared with transformers' elsewhere."""
    ours, others = (each.process("audio", (samples, audio.RATE), {}) for each in processors)
    assert ours.token_ids == others.token_ids
    for name, array in others.arrays.items():
        np.testing.assert_array_equal(ours.arrays[name], array)


KEY = "clip.audio"
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "images": ("qwen2a", {"clip.has_vision_encoder": True}, {}, "encoder True; expected False"),
    "no audio": ("qwen2a", {"clip.has_audio_encoder": False}, {}, "encoder False; expected True"),
    "norms": (
        "qwen2a",
        {f"{KEY}.attention.layer_norm_epsilon": 1e-6},
        {},
        "clip.audio.attention.layer_norm_epsilon is 1e-06, expected 1e-05",
    ),
    "bins": (
        "qwen2a",
        {f"{KEY}.num_mel_bins": 80},
        {},
        r"\(24, 10, 3\); the metadata says \(24, 8",
    ),
    "layers": ("voxtral", {f"{KEY}.block_count": 3}, {}, "clip.audio.block_count says 3"),
    "no stack": ("ultravox", {f"{KEY}.projector.stack_factor": None}, {}, "factor is missing"),
    "stack": (
        "voxtral",
        {f"{KEY}.projector.stack_factor": 4},
        {},
        "stack_factor is 4, expected feed_forward_length / embedding_length, 48 / 24",
    ),
    "positions": (
        "qwen2a",
        {},
        {"a.position_embd.weight": np.ones((49, 24), np.float32)},
        r"a.position_embd.weight has shape \(49, 24\); expected 50 rows for each second",
    ),
    "another tower": (
        "qwen2a",
        {},
        {"v.blk.0.ln1.weight": np.ones(24, np.float32)},
        "'v.blk.0.ln1.weight' has no place in a model with the projector 'qwen2a'",
    ),
    "a last norm": (
        "ultravox",
        {},
        {"mm.a.norm_post.weight": np.ones(24, np.float32)},
        "'mm.a.norm_post.weight' has no place",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_files_that_are_refused(
    tmp_path: Path, case: tuple[str, dict[str, Any], dict[str, Any], str]
) -> None:
    kind, metadata, tensors, message = case
    family = made(kind, tmp_path / "other")
    reference = write(family, tmp_path, metadata=metadata, tensors=tensors)
    with pytest.raises(ModelError, match=message):
        describe(reference.directory)


@pytest.mark.parametrize("kind", ["qwen2a", "voxtral"])
def test_vocabularies_without_a_token(tmp_path: Path, kind: str) -> None:
    family = made(kind, tmp_path / "other")
    reference = write(family, tmp_path, special=WORDS[kind][1:])
    with pytest.raises(ModelError, match="which prompts with images or audio"):
        describe(reference.directory)


@pytest.fixture(scope="module", params=MODELS)
def files(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Return the file of a language model, and the metadata and tensors of the tower."""
    folder = tmp_path_factory.mktemp("odd")
    family = made(request.param, folder / "other")
    keys, tensors = whisper(family.tensors, family.kind, family.sizes)
    return write(family, folder).directory, keys, tensors


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_odd_metadata(files: tuple[Path, Any, Any], data: Any) -> None:
    """A file has a config that the model takes, or it is an error of the model."""
    path, keys, tensors = files
    key = data.draw(st.sampled_from(sorted(keys)))
    chosen = {**keys, key: data.draw(ODD)}
    kept = {name: value for name, value in chosen.items() if value is not None}
    write_file(path.with_name("mmproj-model.gguf"), "clip", kept, tensors)
    with contextlib.suppress(ModelError):
        processor_of(describe(path))
