"""Models that listen, compared with transformers: the rows of audio, and the logits of prompts with
it, however they are computed."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_granite_speech import sizes as granite_sizes
from pegboard_model_granite_speech.granite_speech import GraniteSpeech
from pegboard_model_qwen2_audio import defaults as qwen2_audio_defaults
from pegboard_model_qwen2_audio.qwen2_audio import AudioFlamingo3, Qwen2Audio
from pegboard_model_voxtral.voxtral import Voxtral
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    check_output,
    language_model,
    make_tokenizer,
    open_media_llm,
    random_model,
)
from tiny_models import divide
from torch import Tensor
from transformers.audio_utils import mel_filter_bank
from transformers.models.granite_speech.feature_extraction_granite_speech import (
    GraniteSpeechFeatureExtractor,
)

from pegboard import SamplingParams
from pegboard.errors import ModelError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard.plugins.importing import import_object, import_spec
from pegboard_media.audio import resample
from pegboard_models import qformer as qformers
from pegboard_models.whisper_sizes import LARGE
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.fake_build import fake_build
from pegboard_weights.hf_files import read_config

RATE = 16_000
AUDIO = 100
SECONDS = 1
"""Of an item of the tiny models: 100 frames, 50 features."""
BINS = 10
ENCODER = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 48,
    "num_mel_bins": BINS,
    "max_source_positions": 50,
}
MARKS = {
    "qwen2_audio": "<|audio_bos|> <|AUDIO|> <|audio_eos|>",
    "voxtral": "[BEGIN_AUDIO] [AUDIO]",
    "granite_speech": "<|audio|>",
    "audioflamingo3": "<sound>",
}
MODELS = {
    "qwen2_audio": Qwen2Audio,
    "voxtral": Voxtral,
    "granite_speech": GraniteSpeech,
    "audioflamingo3": AudioFlamingo3,
}
CONFORMER = {
    "input_dim": 2 * BINS,
    "num_layers": 3,
    "hidden_dim": 24,
    "feedforward_mult": 2,
    "num_heads": 3,
    "output_dim": 7,
    "context_size": 9,
    "max_pos_emb": 11,
    "conv_kernel_size": 4,
}
QFORMER = {
    "model_type": "blip_2_qformer",
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "encoder_hidden_size": 24,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "qwen2_audio": {
        "text_config": {"model_type": "qwen2", **MEDIA_TEXT},
        "audio_config": ENCODER,
        "audio_token_index": AUDIO,
    },
    "voxtral": {
        "text_config": {"model_type": "llama", **MEDIA_TEXT},
        "audio_config": ENCODER,
        "audio_token_id": AUDIO,
    },
    "audioflamingo3": {
        "text_config": {"model_type": "qwen2", **MEDIA_TEXT},
        "audio_config": ENCODER,
        "audio_token_id": AUDIO,
    },
    "granite_speech": {
        "text_config": {"model_type": "granite", "embedding_multiplier": 3.0, **MEDIA_TEXT},
        "encoder_config": CONFORMER,
        "projector_config": QFORMER,
        "audio_token_index": AUDIO,
    },
}


def tone(num_samples: int, seed: int = 0) -> np.ndarray:
    """Return noise, float32 [samples]."""
    random = np.random.default_rng(seed)
    return (random.normal(size=num_samples) * 0.1).astype(np.float32)


def prompt(kind: str, *parts: Any) -> Prompt:
    """Return a prompt of words and audio. parts: numbers of words, or samples."""
    texts = [f"w{part}" if isinstance(part, int) else MARKS[kind] for part in parts]
    items = [(part, RATE) for part in parts if not isinstance(part, int)]
    media = {"multi_modal_data": {"audio": items}} if items else {}
    return {"prompt": " ".join(texts), **media}


def some_prompts(kind: str) -> list[Prompt]:
    """Return prompts with no, one and two items of different lengths."""
    short = tone(4_000, 1)
    long = tone(20_000, 2)
    return [
        prompt(kind, 5, short, 6, 7),
        prompt(kind, *range(8, 30)),
        prompt(kind, long, 9, short, 10),
        prompt(kind, 11, short, long, 12, 13, 14),
        prompt(kind, long),
    ]


def samples_of(one: Prompt) -> list[np.ndarray]:
    items: Sequence[Any] = one.get("multi_modal_data", {}).get("audio", [])
    return [samples for samples, _ in items]


def qwen2_audio_inputs(tokenizer: Any, extractor: Any) -> Callable[[Prompt], Mapping[str, Tensor]]:
    """Return what makes the arguments of transformers' model, with its full processor."""
    processor = transformers.Qwen2AudioProcessor(extractor, tokenizer)

    def inputs(one: Prompt) -> Mapping[str, Tensor]:
        given_samples = samples_of(one)
        more = {"audio": given_samples, "sampling_rate": RATE} if given_samples else {}
        return processor(text=one["prompt"], return_tensors="pt", **more)

    return inputs


def voxtral_inputs(tokenizer: Any, extractor: Any) -> Callable[[Prompt], Mapping[str, Tensor]]:
    """Like `qwen2_audio_inputs`. Their tokenizer needs a package of its own, so the number of
    placeholders is counted here."""
    processor: Any = object.__new__(transformers.VoxtralProcessor)
    processor.feature_extractor = extractor
    options = {
        **transformers.VoxtralProcessor.audio_kwargs,
        "pad_to_multiple_of": SECONDS * RATE,
        "max_source_positions": 100,
    }

    def inputs(one: Prompt) -> Mapping[str, Tensor]:
        texts = one["prompt"].split("[AUDIO]")
        given_samples = samples_of(one)
        if not given_samples:
            return tokenizer(one["prompt"], return_tensors="pt")
        whole = texts[0]
        for samples, text in zip(given_samples, texts[1:], strict=True):
            whole += "[AUDIO]" * (25 * -(-len(samples) // (SECONDS * RATE))) + text
        features = processor._retrieve_input_features(given_samples, **options)
        return {**tokenizer(whole, return_tensors="pt"), "input_features": features}

    return inputs


def granite_features(samples: np.ndarray) -> Tensor:
    """Return what the feature extractor of transformers makes, which needs torchaudio: [frames, 2 ·
    mel bins], from its definition."""
    spectrum = torch.stft(
        torch.from_numpy(samples),
        512,
        160,
        400,
        torch.hann_window(400),
        return_complex=True,
    )
    filters = mel_filter_bank(257, BINS, 0.0, 8000.0, RATE, norm=None, mel_scale="htk")
    mel = spectrum.abs().square().T @ torch.from_numpy(filters).float()
    logs = mel.clip(min=1e-10).log10()
    logs = torch.maximum(logs, logs.max() - 8.0) / 4 + 1
    return logs[: len(logs) // 2 * 2].reshape(-1, 2 * BINS)


def granite_speech_inputs(
    tokenizer: Any, extractor: Any
) -> Callable[[Prompt], Mapping[str, Tensor]]:
    """Like `voxtral_inputs`, with `encode_alone`."""
    counted: Any = object.__new__(GraniteSpeechFeatureExtractor)
    counted.melspec_kwargs = {"hop_length": 160}
    counted.projector_window_size = 15
    counted.projector_downsample_rate = 5

    def inputs(one: Prompt) -> Mapping[str, Tensor]:
        given_samples = samples_of(one)
        if not given_samples:
            return tokenizer(one["prompt"], return_tensors="pt")
        counts = counted._get_num_audio_features([len(each) for each in given_samples])
        texts = one["prompt"].split("<|audio|>")
        whole = texts[0]
        for count, text in zip(counts, texts[1:], strict=True):
            whole += "<|audio|>" * count + text
        features = Items(granite_features(each) for each in given_samples)
        return {**tokenizer(whole, return_tensors="pt"), "input_features": features}

    return inputs


class Items(list[Tensor]):
    """Items of several lengths, where transformers takes a tensor."""

    dtype = torch.float32


def encode_alone(model: Any) -> None:
    """Let transformers' model encode one item at a time: its features of several items see each
    other's padding."""
    inner = model.model
    encode = inner.get_audio_features

    def each_alone(items: Sequence[Tensor], **more: Any) -> Any:
        rows = [encode(item[None], **more).pooler_output[0] for item in items]
        return SimpleNamespace(pooler_output=torch.cat(rows))

    inner.get_audio_features = each_alone


def flamingo_inputs(tokenizer: Any, extractor: Any) -> Callable[[Prompt], Mapping[str, Tensor]]:
    """Return what makes the arguments of transformers' model. Its processor takes one item of a
    prompt, so the others are processed alone."""
    processor = transformers.AudioFlamingo3Processor(extractor, tokenizer)

    def inputs(one: Prompt) -> Mapping[str, Tensor]:
        given_samples = samples_of(one)
        if not given_samples:
            return tokenizer(one["prompt"], return_tensors="pt")
        each = [processor(text="<sound>", audio=samples) for samples in given_samples]
        texts = one["prompt"].split("<sound>")
        whole = texts[0]
        for made, text in zip(each, texts[1:], strict=True):
            whole += "<sound>" * made["input_ids"].shape[1] + text
        names = ("input_features", "input_features_mask")
        more = {name: torch.cat([made[name] for made in each]) for name in names}
        return {**tokenizer(whole, return_tensors="pt"), **more}

    return inputs


INPUTS = {
    "audioflamingo3": flamingo_inputs,
    "qwen2_audio": qwen2_audio_inputs,
    "voxtral": voxtral_inputs,
    "granite_speech": granite_speech_inputs,
}


def write(kind: str, folder: Path) -> MediaReference:
    """Write a model with the values of its feature extractor."""
    config = {**ENCODERS[kind], "tie_word_embeddings": False}
    auto = (
        transformers.AutoModelForSeq2SeqLM
        if kind == "audioflamingo3"
        else transformers.AutoModelForMultimodalLM
    )
    model = random_model(auto, kind, **config)
    model.save_pretrained(folder)
    marks = MARKS[kind].split()
    named = sorted(marks, key=lambda mark: "bos" in mark or "eos" in mark or "BEGIN" in mark)
    tokenizer = make_tokenizer(named, MARKS[kind])
    tokenizer.chat_template = tokenizer.chat_template.replace("'image'", "'audio'")
    tokenizer.save_pretrained(folder)
    if kind == "granite_speech":
        encode_alone(model)
    extractor = transformers.WhisperFeatureExtractor(feature_size=BINS, chunk_length=SECONDS)
    extractor.save_pretrained(folder)
    if kind == "granite_speech":
        values = {"melspec_kwargs": {"n_mels": BINS}}
        (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return MediaReference(folder, model, INPUTS[kind](tokenizer, extractor))


@pytest.fixture(scope="module", params=MODELS)
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(kind: str, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(kind, tmp_path_factory.mktemp(kind))


def processor_of(kind: str, folder: Path) -> Any:
    """Return our processor of a checkpoint."""
    config = read_config(folder)
    checkpoint = Checkpoint(
        format="safetensors",
        path=folder,
        config=config,
        architectures=(),
        tensors={},
        tokenizer=None,
    )
    own: Any = None
    entry = installed_entry("multimodal_processor", config["architectures"][0])
    make = import_object(import_spec(entry).implementation)
    return make(None, MultiModalProcessorSetup(checkpoint, own))


LAYOUTS: dict[str, Callable[[str], str]] = {
    "as written": lambda name: name,
    "below model": lambda name: (
        name.replace("language_model.lm_head", "lm_head")
        if "lm_head" in name
        else f"model.{name}".replace("language_model.model.", "language_model.")
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@given(lengths=st.lists(st.integers(700, 40_000), min_size=1, max_size=3))
@settings(max_examples=8, deadline=None)
@torch.no_grad()
def test_tokens_and_rows(
    kind: str, reference: MediaReference, layout: str, lengths: list[int]
) -> None:
    """The token ids of a prompt, and what transformers' projector makes of its audio."""
    model, _ = built_model(MODELS[kind], reference.directory, LAYOUTS[layout])
    processor = processor_of(kind, reference.directory)
    sounds = [tone(length, length) for length in lengths]
    given_inputs = reference.inputs(prompt(kind, *sounds))
    found = [processor.process("audio", (samples, RATE), {}) for samples in sounds]
    counts = [len(one.token_ids) for one in found]
    is_audio = given_inputs["input_ids"][0] == AUDIO
    assert sum(counts) == int(is_audio.sum())
    theirs = their_rows(reference.model, given_inputs, counts)
    items = [{name: torch.from_numpy(value) for name, value in one.arrays.items()} for one in found]
    rows = model.encode("audio", items)
    for ours, expected, count in zip(rows, theirs, counts, strict=True):
        torch.testing.assert_close(ours, expected[:count], atol=1e-4, rtol=1e-4)


def their_rows(
    model: Any, given_inputs: Mapping[str, Tensor], counts: list[int]
) -> Sequence[Tensor]:
    """Return what transformers' projector makes of each item, with padding."""
    made: list[Tensor] = []
    inner = model.model
    if isinstance(given_inputs["input_features"], Items):
        rows = inner.get_audio_features(given_inputs["input_features"]).pooler_output
        return (rows * model.config.text_config.embedding_multiplier).split(counts)
    if "input_features_mask" in given_inputs:
        given_parts = given_inputs["input_features"], given_inputs["input_features_mask"]
        return inner.get_audio_features(*given_parts).pooler_output.split(counts)
    handle = inner.multi_modal_projector.register_forward_hook(lambda *given: made.append(given[2]))
    model(**given_inputs)
    handle.remove()
    return made[0] if made[0].dim() == 3 else made[0].split(counts)


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 70},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(kind: str, reference: MediaReference, options: dict[str, Any]) -> None:
    """Twice: the second time, the prefixes are in the cache."""
    check_media(reference, some_prompts(kind), repeats=2, **options)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2)])
def test_divided(
    kind: str,
    reference: MediaReference,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    stages: int,
) -> None:
    divide(monkeypatch, ranks, stages)
    check_media(reference, some_prompts(kind))


def test_a_chat(kind: str, reference: MediaReference) -> None:
    """The samples of a file with another rate are resampled."""
    samples = tone(4_000, 3)
    content = io.BytesIO()
    soundfile.write(content, samples, 8_000, format="WAV", subtype="FLOAT")
    data = base64.b64encode(content.getvalue()).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": "w7 w8"},
    ]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    one = prompt(kind, 1, resample(samples, 8_000, RATE), 7, 8, 3)
    check_output(reference, one, output.outputs[0], 1e-4)


def test_only_the_first_stage_has_an_encoder(kind: str, reference: MediaReference) -> None:
    _, used = built_model(MODELS[kind], reference.directory, layers=range(1, 2))
    assert not any(part in name for name in used for part in ("audio_", "encoder", "projector"))


def test_values_that_a_config_lacks() -> None:
    theirs = transformers.Qwen2AudioConfig().to_dict()
    assert LARGE.items() <= theirs["audio_config"].items()
    assert theirs["audio_token_index"] == qwen2_audio_defaults.AUDIO_TOKEN
    flamingo = transformers.AudioFlamingo3Config()
    assert flamingo.audio_token_id == qwen2_audio_defaults.FLAMINGO_AUDIO_TOKEN
    for name, value in LARGE.items():
        assert getattr(flamingo.audio_config, name) == value
    voxtral = transformers.VoxtralConfig().audio_config
    assert {name: getattr(voxtral, name) for name in LARGE} == LARGE


def test_values_that_a_granite_config_lacks() -> None:
    theirs = transformers.GraniteSpeechConfig()
    assert granite_sizes.ENCODER.items() <= theirs.encoder_config.to_dict().items()
    assert qformers.QFORMER.items() <= theirs.projector_config.to_dict().items()
    assert granite_sizes.WINDOWS.items() <= theirs.to_dict().items()
    assert theirs.audio_token_id == granite_sizes.AUDIO_TOKEN
    head = {"dim_head": theirs.encoder_config.dim_head}
    assert granite_sizes.EncoderSizes.of({}) == granite_sizes.EncoderSizes.of(head)


def test_features_that_are_no_rows() -> None:
    config = {
        "text_config": {"model_type": "llama", **MEDIA_TEXT},
        "audio_config": {**ENCODER, "encoder_ffn_dim": 47},
    }
    with pytest.raises(ModelError, match="50 features of 24 numbers, which are not rows of 47"):
        Voxtral(config, fake_build(models=language_model))
