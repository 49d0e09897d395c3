"""Qwen-Omni: the rows, positions and logits of transformers, with images, audio and videos in one
prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_qwen_omni.qwen_omni import Qwen3Omni, Qwen25Omni
from pegboard_model_qwen_omni.sizes import (
    AUDIO_TOKEN,
    CHUNK,
    RATE,
    THETA,
    VISION_TOKENS,
    WINDOW,
)
from safetensors.torch import load_file, save_file
from test_qwen_vl_parity import patched, sections
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    language_model,
    make_tokenizer,
    random_model,
)
from tiny_models import divide
from torch.nn import functional
from transformers import AutoConfig
from transformers.models.qwen2_5_omni import processing_qwen2_5_omni as processing_2_5
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe import processing_qwen3_omni_moe as processing_3

from pegboard.errors import ModelError
from pegboard_media.video import check_video
from pegboard_models.deep_sizes import DEEP, DEEP_TAPS
from pegboard_models.whisper_sizes import LARGE
from pegboard_models.window_sizes import LATER, LATER_WHOLE
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build
from pegboard_testing.video_peers import random_video
from pegboard_weights.hf_files import read_config, with_defaults

RATE_OF_AUDIO = 16_000
SECONDS = 2
"""The longest audio of the tiny models."""
BINS = 10
HIDDEN = MEDIA_TEXT["hidden_size"]
LIMITS = {"min_pixels": 64, "max_pixels": 1024}
MARKS = {
    "qwen2_5_omni": {
        "image": "<|vision_bos|> <|IMAGE|> <|vision_eos|>",
        "video": "<|vision_bos|> <|VIDEO|> <|vision_eos|>",
        "audio": "<|audio_bos|> <|AUDIO|> <|audio_eos|>",
    },
    "qwen3_omni_moe": {
        "image": "<|vision_start|> <|image_pad|> <|vision_end|>",
        "video": "<|vision_start|> <|video_pad|> <|vision_end|>",
        "audio": "<|audio_start|> <|audio_pad|> <|audio_end|>",
    },
}
START, IMAGE, END, VIDEO, AUDIO_START, AUDIO, AUDIO_END = range(100, 107)
"""The ids of the tokens of the marks, in this order."""
VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": {
        "hidden_size": 24,
        "num_heads": 3,
        "depth": 3,
        "intermediate_size": 40,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": HIDDEN,
    },
    "qwen3_omni_moe": {
        "hidden_size": 24,
        "num_heads": 3,
        "depth": 3,
        "intermediate_size": 40,
        "patch_size": 4,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [2, 0],
        "out_hidden_size": HIDDEN,
    },
}
LISTENER: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": {
        "d_model": 24,
        "encoder_layers": 2,
        "encoder_attention_heads": 3,
        "encoder_ffn_dim": 48,
        "num_mel_bins": BINS,
        "max_source_positions": 20,
        "n_window": 15,
        "output_dim": HIDDEN,
    },
    "qwen3_omni_moe": {
        "d_model": 24,
        "encoder_layers": 2,
        "encoder_attention_heads": 3,
        "encoder_ffn_dim": 48,
        "num_mel_bins": BINS,
        "max_source_positions": 20,
        "n_window": 50,
        "n_window_infer": 250,
        "downsample_hidden_size": 6,
        "output_dim": HIDDEN,
    },
}
KEYS = {"qwen2_5_omni": "index", "qwen3_omni_moe": "id"}
"""How the names of tokens end."""
MODELS = {"qwen2_5_omni": Qwen25Omni, "qwen3_omni_moe": Qwen3Omni}
MORE_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": {},
    "qwen3_omni_moe": {
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "head_dim": HIDDEN // MEDIA_TEXT["num_attention_heads"],
    },
}
CLASSES = {
    "qwen2_5_omni": (
        transformers.Qwen2_5OmniForConditionalGeneration,
        transformers.Qwen2_5OmniThinkerForConditionalGeneration,
    ),
    "qwen3_omni_moe": (
        transformers.Qwen3OmniMoeForConditionalGeneration,
        transformers.Qwen3OmniMoeThinkerForConditionalGeneration,
    ),
}


def special_tokens(kind: str) -> list[str]:
    """Return the special tokens of a kind, in the order of their ids."""
    marks = MARKS[kind]
    vision = marks["image"].split()
    return [*vision, marks["video"].split()[1], *marks["audio"].split()]


def tone(num_samples: int, seed: int = 0) -> np.ndarray:
    """Return noise, float32 [samples]."""
    random = np.random.default_rng(seed)
    return (random.normal(size=num_samples) * 0.1).astype(np.float32)


def prompt(kind: str, *parts: Any) -> Prompt:
    """Return a prompt. parts: numbers of words, samples, images, or pairs of frames and their
    rate."""
    texts = []
    media: dict[str, list[Any]] = {}
    for part in parts:
        if isinstance(part, int):
            texts.append(f"w{part}")
            continue
        is_audio = isinstance(part, np.ndarray)
        modality = "audio" if is_audio else "video" if isinstance(part, tuple) else "image"
        texts.append(MARKS[kind][modality])
        media.setdefault(modality, []).append((part, RATE_OF_AUDIO) if is_audio else part)
    data = {"multi_modal_data": media, "mm_processor_kwargs": LIMITS} if media else {}
    return {"prompt": " ".join(texts), **data}


def some_prompts(kind: str) -> list[Prompt]:
    """Return prompts with items of all modalities, in several orders."""
    image = random_image(40, 20, seed=1)
    long = random_video(7, 20, 16, fps=2.0, seed=2)
    short = random_video(2, 13, 30, fps=10.0, seed=3)
    sound = tone(9_000, 1)
    noise = tone(3_500, 2)
    return [
        prompt(kind, 5, sound, 6, 7),
        prompt(kind, *range(8, 30)),
        prompt(kind, long, 9, noise, 10, image),
        prompt(kind, image, 11, short, sound, 12, long, 13),
        prompt(kind, noise, sound),
    ]


def thinker_config(kind: str) -> dict[str, Any]:
    text = {
        "model_type": f"{kind}_text",
        **MEDIA_TEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": sections(),
        },
        **MORE_TEXT[kind],
    }
    tokens = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
    return {
        "text_config": text,
        "vision_config": VISION[kind],
        "audio_config": LISTENER[kind],
        **{
            f"{modality}_token_{'index' if kind == 'qwen2_5_omni' else 'id'}": token
            for modality, token in tokens.items()
        },
        "vision_start_token_id": START,
        "audio_start_token_id": AUDIO_START,
        "position_id_per_seconds": 5,
    }


class Direct:
    """A class of transformers that is built of a config, like an Auto class."""

    def __init__(self, kind: Any) -> None:
        self.from_config = kind._from_config


def write(folder: Path, kind: str, *, is_whole: bool = True, **more: Any) -> MediaReference:
    """Write a model. is_whole: with the thinker inside, as in published checkpoints."""
    values = {**thinker_config(kind), **more}
    whole, thinker = CLASSES[kind]
    if is_whole:
        model = random_model(Direct(whole), kind, thinker_config=values, enable_audio_output=False)
    else:
        model = random_model(Direct(thinker), f"{kind}_thinker", **values)
    model.save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(patch_size=4, **LIMITS)
    extractor = transformers.WhisperFeatureExtractor(feature_size=BINS, chunk_length=SECONDS)
    write_processors(folder, images, extractor)
    tokenizer = make_tokenizer(special_tokens(kind), "")
    tokenizer.save_pretrained(folder)
    thinker = model.thinker if is_whole else model
    encode_alone(thinker)
    return MediaReference(folder, thinker, inputs_of(kind, images, extractor, tokenizer))


def encode_alone(thinker: Any) -> None:
    """Let transformers' model encode one recording at a time: with several, the end of a recording
    is padded to the longest of all, and its rows depend on the others."""
    inner = thinker.model
    encode = inner.get_audio_features

    def each_alone(mels: torch.Tensor, masks: torch.Tensor, *given: Any, **more: Any) -> Any:
        parts = [
            encode(mel[None], mask[None], **more).last_hidden_state
            for mel, mask in zip(mels, masks, strict=True)
        ]
        return SimpleNamespace(last_hidden_state=torch.cat(parts))

    inner.get_audio_features = each_alone


def write_processors(folder: Path, images: Any, extractor: Any) -> None:
    """Write both to one file, as in published checkpoints."""
    values = {**extractor.to_dict(), **images.to_dict()}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))


def inputs_of(kind: str, images: Any, extractor: Any, tokenizer: Any) -> Any:
    """Return what makes the arguments of transformers' model."""

    def inputs(one: Prompt) -> Mapping[str, Any]:
        media = one.get("multi_modal_data", {})
        pictures = media.get("image", [])
        arrays = dict(images(pictures, return_tensors="pt")) if pictures else {}
        counts: dict[int, list[int]] = {
            IMAGE: [int(grid.prod()) // 4 for grid in arrays.get("image_grid_thw", [])]
        }
        videos = [check_video(video) for video in media.get("video", [])]
        if films := [patched(images, video.frames) for video in videos]:
            arrays["pixel_values_videos"] = torch.cat([patches for patches, _ in films])
            arrays["video_grid_thw"] = torch.tensor([grid for _, grid in films])
            arrays["video_second_per_grid"] = torch.tensor([2 / video.fps for video in videos])
            counts[VIDEO] = [int(grid.prod()) // 4 for grid in arrays["video_grid_thw"]]
        if sounds := [samples for samples, _ in media.get("audio", [])]:
            arrays |= features_of(kind, extractor, sounds)
            masks = arrays["feature_attention_mask"]
            counts[AUDIO] = [rows_of(kind, int(mask.sum())) for mask in masks]
        remaining = {token: iter(numbers) for token, numbers in counts.items()}
        ids: list[int] = []
        for token in tokenizer.encode(one["prompt"]):
            ids += [token] * (next(remaining[token]) if token in remaining else 1)
        return {"input_ids": torch.tensor([ids]), **arrays}

    return inputs


PADDING: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": {"padding": "max_length"},
    "qwen3_omni_moe": {"padding": True, "truncation": False},
}


def features_of(kind: str, extractor: Any, sounds: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the features of each recording, as if it were alone, below each other."""
    options = {"sampling_rate": RATE_OF_AUDIO, "return_attention_mask": True, **PADDING[kind]}
    each = [extractor([samples], return_tensors="pt", **options) for samples in sounds]
    longest = max(one["input_features"].shape[2] for one in each)
    mels = [one["input_features"][0] for one in each]
    masks = [one["attention_mask"][0] for one in each]

    def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
        missing = [longest - tensor.shape[-1] for tensor in tensors]
        pairs = zip(tensors, missing, strict=True)
        return torch.stack([functional.pad(tensor, (0, count)) for tensor, count in pairs])

    return {"input_features": padded(mels), "feature_attention_mask": padded(masks)}


def rows_of(kind: str, num_frames: int) -> int:
    module = processing_2_5 if kind == "qwen2_5_omni" else processing_3
    return int(module._get_feat_extract_output_lengths(num_frames))


@pytest.fixture(scope="module", params=MODELS)
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(kind: str, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(tmp_path_factory.mktemp(kind), kind)


@pytest.mark.parametrize("modality", ["image", "video"])
def test_rows(kind: str, reference: MediaReference, modality: str) -> None:
    ours, _ = built_model(MODELS[kind], reference.directory)
    grids = torch.tensor([[1, 6, 4], [1, 2, 2], [1, 10, 14], [1, 8, 8], [1, 2, 12]])
    if modality == "video":
        grids[:, 0] = torch.tensor([3, 1, 2, 5, 2])
    pixels = [torch.randn(int(grid.prod()), 3 * 2 * 16) for grid in grids]
    features = getattr(reference.model, f"get_{modality}_features")
    with torch.no_grad():
        expected = features(torch.cat(pixels), grids)
    name = "pixel_values" if modality == "image" else "pixel_values_videos"
    items = [
        {name: each, f"{modality}_grid_thw": grid} for each, grid in zip(pixels, grids, strict=True)
    ]
    levels = [expected.pooler_output, *getattr(expected, "deepstack_features", [])]
    for found, *rows in zip(ours.encode(modality, items), *levels, strict=True):
        torch.testing.assert_close(found, torch.cat(rows, 1), atol=1e-5, rtol=1e-5)


@given(lengths=st.lists(st.integers(3, 90) | st.integers(90, 700), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
@torch.no_grad()
def test_rows_of_audio(kind: str, reference: MediaReference, lengths: list[int]) -> None:
    ours, _ = built_model(MODELS[kind], reference.directory)
    mels = [torch.randn(BINS, length) for length in lengths]
    rows = ours.encode("audio", [{"input_features": mel} for mel in mels])
    tower = reference.model.model.audio_tower
    for mel, found in zip(mels, rows, strict=True):
        length = torch.tensor([mel.shape[1]])
        expected = tower(mel, feature_lens=length).last_hidden_state
        torch.testing.assert_close(found[:, :HIDDEN], expected, atol=1e-5, rtol=1e-5)
        assert not found[:, HIDDEN:].any()


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 512, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 100},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(kind: str, reference: MediaReference, options: dict[str, Any]) -> None:
    """Twice: the second time, the prefixes are in the cache."""
    check_media(reference, some_prompts(kind), repeats=2, **options)


def test_divided(kind: str, reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2, 2)
    check_media(reference, some_prompts(kind), num_tokens=3)


def test_recorded(kind: str, reference: MediaReference, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pegboard")
    check_media(reference, some_prompts(kind), block_size=16)
    assert "eagerly" not in caplog.text and "not replayed" not in caplog.text


def test_preempted(kind: str, reference: MediaReference) -> None:
    prompts = some_prompts(kind)
    many = [prompts[0], prompts[2], prompts[4]]
    check_media(reference, many, num_tokens=12, num_gpu_blocks_override=20, max_model_len=60)


def test_a_thinker_alone(kind: str, tmp_path: Path) -> None:
    check_media(write(tmp_path, kind, is_whole=False), some_prompts(kind), num_tokens=3)


def test_names_of_newer_files(kind: str, tmp_path: Path) -> None:
    """All parts may be below "model"."""
    reference = write(tmp_path, kind)
    file = tmp_path / "model.safetensors"
    tensors = {newer(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    check_media(reference, some_prompts(kind), num_tokens=3)


def newer(name: str) -> str:
    for part in ("visual", "audio_tower"):
        name = name.replace(f"thinker.{part}.", f"thinker.model.{part}.")
    is_outside = name.startswith(("thinker.model.visual.", "thinker.model.audio_tower."))
    return name if is_outside else name.replace("thinker.model.", "thinker.model.language_model.")


@pytest.mark.parametrize("layout", [str, newer], ids=["published", "newer"])
def test_names_of_adapters(
    kind: str, reference: MediaReference, layout: Callable[[str], str]
) -> None:
    """Adapters use the names of either file, or those of a thinker alone."""
    stored = load_file(reference.directory / "model.safetensors")
    names = {layout(name) for name in stored}
    build = fake_build(stored=names, models=language_model)
    MODELS[kind](with_defaults(read_config(reference.directory)), build)
    path = next(name for name in names if "embed_tokens" in name).removesuffix(
        ".embed_tokens.weight"
    )
    others = {"model", "model.language_model", "thinker.model", "thinker.model.language_model"}
    aliases = build.declared.aliases
    assert {other for other in others if aliases.get(other) == path} == others - {path}
    assert aliases["lm_head"] == "thinker.lm_head"


def test_tied_embeddings(kind: str, tmp_path: Path) -> None:
    reference = write(tmp_path, kind, tie_word_embeddings=True)
    check_media(reference, some_prompts(kind), num_tokens=3)


def test_only_the_first_stage_has_encoders(kind: str, reference: MediaReference) -> None:
    _, used = built_model(MODELS[kind], reference.directory, layers=range(1, 2))
    assert not any(part in name for name in used for part in ("audio_", "visual"))


def test_values_that_a_config_lacks() -> None:
    theirs = AutoConfig.for_model("qwen2_5_omni").thinker_config
    assert LATER.items() <= theirs.vision_config.to_dict().items()
    assert tuple(theirs.vision_config.fullatt_block_indexes) == LATER_WHOLE
    assert {**LARGE, **WINDOW}.items() <= theirs.audio_config.to_dict().items()
    assert (theirs.image_token_id, theirs.video_token_id) == VISION_TOKENS
    assert theirs.audio_token_id == AUDIO_TOKEN
    assert theirs.position_id_per_seconds == RATE
    assert theirs.text_config.default_theta == THETA


def test_values_that_a_later_config_lacks() -> None:
    theirs = AutoConfig.for_model("qwen3_omni_moe").thinker_config
    vision = theirs.vision_config.to_dict()
    assert DEEP.items() <= vision.items()
    assert tuple(vision["deepstack_visual_indexes"]) == DEEP_TAPS
    assert {**LARGE, **CHUNK}.items() <= theirs.audio_config.to_dict().items()
    assert (theirs.image_token_id, theirs.video_token_id) == VISION_TOKENS
    assert (theirs.audio_token_id, theirs.position_id_per_seconds) == (AUDIO_TOKEN, RATE)
    assert theirs.text_config.default_theta == THETA
    assert theirs.text_config.norm_topk_prob


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"audio_config": {"n_window": 0}}, "n_window=0; expected a whole number from 1 on"),
    ({"audio_config": {"output_dim": 7}}, "rows of audio have 7 numbers; those of its language"),
    ({"audio_config": {"d_model": 27}}, "d_model=27; expected an even number"),
    ({"audio_config": {"encoder_layers": 0}}, "encoder_layers=0; expected a whole number"),
    ({"vision_config": {"out_hidden_size": 7}}, "rows of images have 7 numbers"),
    ({"vision_config": {"depth": 0}}, "depth=0; expected a whole number from 1 on"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_configs_that_are_refused(
    kind: str, reference: MediaReference, change: dict[str, Any], message: str
) -> None:
    check_refused(kind, reference, change, message)


def test_windows_that_are_refused(tmp_path: Path) -> None:
    reference = write(tmp_path, "qwen2_5_omni")
    change: dict[str, Any] = {"text_config": {"rope_parameters": {"rope_theta": 1e4}}}
    check_refused("qwen2_5_omni", reference, change, "have no mrope_section; expected")
    change = {"audio_config": {"n_window": 21}}
    check_refused("qwen2_5_omni", reference, change, "n_window=21; expected at most max_source_po")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_window": 48}, "n_window=48; expected a number whose chunks have 13 rows: 49 to 52"),
        ({"n_window_infer": 99}, "n_window_infer=99; expected at least 100, the frames of a chunk"),
        ({"max_source_positions": 12}, "max_source_positions=12; expected at least 13"),
        ({"downsample_hidden_size": 0}, "downsample_hidden_size=0; expected a whole number"),
    ],
)
def test_chunks_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    reference = write(tmp_path, "qwen3_omni_moe")
    check_refused("qwen3_omni_moe", reference, {"audio_config": change}, message)


def test_weights_of_experts_as_they_are(tmp_path: Path) -> None:
    text = {**thinker_config("qwen3_omni_moe")["text_config"], "norm_topk_prob": False}
    reference = write(tmp_path, "qwen3_omni_moe", text_config=text)
    check_media(reference, some_prompts("qwen3_omni_moe"), num_tokens=3)


def check_refused(
    kind: str, reference: MediaReference, change: dict[str, Any], message: str
) -> None:
    config = with_defaults(read_config(reference.directory))
    thinker = {**config["thinker_config"]}
    for name, values in change.items():
        thinker[name] = {**thinker[name], **values}
    config = {**config, "thinker_config": thinker, "text_config": thinker["text_config"]}
    with pytest.raises(ModelError, match=message):
        MODELS[kind](config, fake_build(models=language_model))


def test_a_config_of_another_form(kind: str) -> None:
    with pytest.raises(ModelError, match="thinker_config=3; expected an object"):
        MODELS[kind]({"thinker_config": 3}, fake_build(models=language_model))
