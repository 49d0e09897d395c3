"""Idefics 3, SmolVLM and InternVL, compared with transformers: the rows of images, and the logits
of prompts with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_idefics3.idefics3 import Idefics3
from pegboard_model_internvl.internvl import InternVL
from safetensors.torch import load_file
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    language_model,
    make_media_model,
    make_tokenizer,
    some_prompts,
)
from torch import Tensor
from transformers import AutoConfig, Idefics3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from pegboard.errors import ModelError
from pegboard_models.vision_sizes import DEFAULTS
from pegboard_testing.fake_build import fake_build
from pegboard_testing.media_peers import idefics3_processor, internvl_processor

IMAGE = 100
SIDE = 16
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": SIDE,
    "patch_size": 4,
}
SQUARES = {"image_size": [SIDE, SIDE], "patch_size": [4, 4]}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "idefics3": ("idefics3", "llama", {}, {}),
    "smolvlm": ("smolvlm", "llama", {"hidden_act": "gelu"}, {"scale_factor": 4}),
    "internvl": ("internvl", "qwen2", {}, {}),
    "internvl, other layers": (
        "internvl",
        "llama",
        {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True},
        {"downsample_ratio": 0.25, "projector_hidden_act": "relu"},
    ),
    "internvl, last norm": (
        "internvl",
        "qwen3",
        {**SQUARES, "use_mean_pooling": False, "use_absolute_position_embeddings": False},
        {},
    ),
    "internvl, earlier layer": (
        "internvl",
        "qwen2",
        {"use_mean_pooling": False},
        {"vision_feature_layer": 1},
    ),
}
LAYOUTS: dict[str, Callable[[str], str]] = {
    "as written": lambda name: name,
    "other": lambda name: (
        f"model.{name}".replace("language_model.model.", "language_model.")
        if name.startswith(("language_model.model.", "vision_tower.", "multi_modal_projector."))
        else name.removeprefix("language_model.")
    ),
}
MODELS = {"idefics3": Idefics3, "smolvlm": Idefics3, "internvl": InternVL}


def config_of(
    kind: str, text: str, vision: Mapping[str, Any], more: Mapping[str, Any]
) -> dict[str, Any]:
    tower = {"idefics3": "idefics3_vision", "smolvlm": "smolvlm_vision"}
    return {
        "text_config": {"model_type": text, **MEDIA_TEXT},
        "vision_config": {
            "model_type": tower.get(kind, "internvl_vision"),
            **VISION,
            **vision,
        },
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
        **more,
    }


@pytest.fixture(scope="module", params=CASES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """Return the kind, the model of transformers and its checkpoint."""
    kind, *values = CASES[request.param]
    folder = tmp_path_factory.mktemp("tiles")
    model = make_media_model(kind, **config_of(kind, *values))
    model.save_pretrained(folder)
    return kind, model, folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
@settings(max_examples=6, deadline=None)
def test_rows(pair: Any, layout: str, counts: list[int]) -> None:
    kind, reference, folder = pair
    model, _ = built_model(MODELS[kind], folder, LAYOUTS[layout])
    images = [torch.randn(count, 3, SIDE, SIDE) for count in counts]
    found = model.encode("image", [{"pixel_values": image} for image in images])
    assert len(found) == len(images)
    for image, ours in zip(images, found, strict=True):
        with torch.no_grad():
            tiles = image if kind == "internvl" else image[None]
            output = reference.get_image_features(tiles).pooler_output
        theirs = output.flatten(0, 1) if kind == "internvl" else output[0]
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_tensors_that_are_read(pair: Any) -> None:
    """All but the layers of a tower after the selected one."""
    kind, reference, folder = pair
    _, used = built_model(MODELS[kind], folder)
    left_out = load_file(folder / "model.safetensors").keys() - used
    places = (".layer.1.", ".layer.2.", "tower.layernorm.")
    is_cut = getattr(reference.config, "vision_feature_layer", -1) == 1
    assert bool(left_out) == is_cut
    assert all("vision" in name and any(place in name for place in places) for name in left_out)


def test_only_the_first_stage_has_a_tower(pair: Any) -> None:
    kind, _, folder = pair
    _, used = built_model(MODELS[kind], folder, layers=range(1, 2))
    assert not any("vision" in name or "projector" in name or "connect" in name for name in used)


def write(kind: str, folder: Path) -> tuple[MediaReference, str]:
    """Write a model with a processor of few tiles. Return them with the placeholder's text."""
    is_intern = kind == "internvl"
    vision, more = ({}, {"image_seq_length": 4}) if is_intern else ({}, {})
    model = make_media_model(kind, **config_of(kind, "llama", vision, more))
    model.save_pretrained(folder)
    if is_intern:
        mark = "<IMG_CONTEXT>"
        tokens = make_tokenizer([mark, "<img>", "</img>", "<video>"], mark)
        images: Any = GotOcr2ImageProcessorPil(
            size={"height": SIDE, "width": SIDE}, crop_to_patches=True, max_patches=3
        )
        processor = internvl_processor(images, tokens, rows=4)
    else:
        mark = "<image>"
        places = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
        special = [mark, "<fake_token_around_image>", "<global-img>", *places, "\n", "\n\n"]
        tokens = make_tokenizer([*special, "<end_of_utterance>"], mark)
        images = Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
        )
        processor = idefics3_processor(images, tokens, rows=4)
    images.save_pretrained(folder)
    tokens.save_pretrained(folder)

    def inputs(one: Prompt) -> Mapping[str, Tensor]:
        found = one.get("multi_modal_data", {}).get("image")
        return processor(text=one["prompt"], images=found, return_tensors="pt")

    return MediaReference(folder, model, inputs), mark


@pytest.fixture(scope="module", params=["idefics3", "smolvlm", "internvl"])
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[MediaReference, str]:
    return write(request.param, tmp_path_factory.mktemp(request.param))


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(family: tuple[MediaReference, str], chosen: dict[str, Any]) -> None:
    reference, mark = family
    check_media(reference, some_prompts(mark), repeats=2, **chosen)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks(tmp_path: Path, split: str) -> None:
    reference, mark = write("internvl", tmp_path)
    check_media(reference, some_prompts(mark)[:1], num_tokens=3, **{split: 2})


@pytest.mark.parametrize(
    ("kind", "vision", "more", "message"),
    [
        ("idefics3", {}, {"scale_factor": 3}, "4 patches a side, which cannot be merged by 3"),
        ("idefics3", {}, {"scale_factor": 0}, "scale_factor=0; expected a positive"),
        ("internvl", {}, {"downsample_ratio": 0.3}, "downsample_ratio=0.3; expected 1, 0.5"),
        ("internvl", {}, {"vision_feature_layer": [0, 1]}, "InternVL takes one layer"),
        ("internvl", {}, {"vision_feature_select_strategy": "full"}, "and 'default'"),
        ("internvl", {"image_size": [16, 8]}, {}, "image_size=.16, 8.; expected equal sides"),
        ("internvl", {"norm_type": "none"}, {}, "norm_type='none'; expected one of layer_norm"),
        ("internvl", {"model_type": "siglip_vision_model"}, {}, "supported: internvl_vision"),
    ],
)
def test_configs_that_are_refused(
    kind: str, vision: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    config = config_of(kind, "llama", vision, more)
    with pytest.raises(ModelError, match=message):
        MODELS[kind](config, fake_build(models=language_model))


@pytest.mark.parametrize("kind", ["idefics3_vision", "smolvlm_vision", "internvl_vision"])
def test_sizes_that_a_vision_config_lacks(kind: str) -> None:
    theirs = AutoConfig.for_model(kind).to_dict()
    for name in ("image_size", "patch_size"):
        if isinstance(theirs[name], list | tuple):
            theirs[name] = theirs[name][0]
    own = "internvl_vision" if kind.startswith("intern") else "idefics3_vision"
    assert DEFAULTS[own].items() <= theirs.items()


def test_a_text_config_that_names_an_architecture_of_its_own() -> None:
    config = config_of("smolvlm", "llama", {}, {})
    config["text_config"]["architectures"] = ["VLlama3ForCausalLM"]
    Idefics3(config, fake_build(models=language_model))
