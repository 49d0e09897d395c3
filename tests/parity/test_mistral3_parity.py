"""Pixtral's tower in Mistral 3 and LLaVA, compared with transformers: the rows of images, and the
logits of prompts with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_llava.llava import Llava, LlavaNext
from pegboard_model_mistral3.mistral3 import Mistral3
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

from pegboard.errors import ModelError
from pegboard_models.vision_sizes import DEFAULTS
from pegboard_testing.fake_build import fake_build
from pegboard_testing.media_peers import pixtral_processor

IMAGE = 100
PATCH = 4
VISION = {
    "model_type": "pixtral",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": PATCH,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral3": ("mistral3", {}, {}),
    "mistral3, of three": (
        "mistral3",
        {"hidden_act": "silu"},
        {"spatial_merge_size": 3, "vision_feature_layer": -2, "projector_hidden_act": "relu"},
    ),
    "mistral3, not merged": (
        "mistral3",
        {"rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"}},
        {"spatial_merge_size": 1, "multimodal_projector_bias": True},
    ),
    "llava": ("llava", {}, {"vision_feature_layer": -1}),
    "llava, several": ("llava", {"hidden_act": "silu"}, {"vision_feature_layer": [0, -1]}),
}
LAYOUTS: dict[str, Callable[[str], str]] = {
    "as written": lambda name: name,
    "below model": lambda name: (
        name.replace("language_model.lm_head", "lm_head")
        if "lm_head" in name
        else f"model.{name}".replace("language_model.model.", "language_model.")
    ),
}
MODELS = {"mistral3": Mistral3, "llava": Llava}


def config_of(kind: str, vision: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    strategy = {"vision_feature_select_strategy": "full"} if kind == "llava" else {}
    return {
        "text_config": {"model_type": "mistral", "sliding_window": None, **MEDIA_TEXT},
        "vision_config": {**VISION, **vision},
        "image_token_index": IMAGE,
        "tie_word_embeddings": False,
        **strategy,
        **more,
    }


@pytest.fixture(scope="module", params=CASES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """Return the kind, the model of transformers and its checkpoint."""
    kind, vision, more = CASES[request.param]
    folder = tmp_path_factory.mktemp("pixtral")
    model = make_media_model(kind, **config_of(kind, vision, more))
    model.save_pretrained(folder)
    return kind, model, folder


def padded(images: list[Tensor]) -> Tensor:
    """Return images of several sizes as transformers takes them."""
    sides = [max(image.shape[axis] for image in images) for axis in (1, 2)]
    whole = torch.zeros(len(images), 3, *sides)
    for row, image in zip(whole, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = image
    return whole


@pytest.mark.parametrize("layout", LAYOUTS)
@given(sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(2, 5)), min_size=1, max_size=4))
@settings(max_examples=8, deadline=None)
def test_rows(pair: Any, layout: str, sizes: list[tuple[int, int]]) -> None:
    kind, reference, folder = pair
    model, _ = built_model(MODELS[kind], folder, LAYOUTS[layout])
    side = PATCH * getattr(reference.config, "spatial_merge_size", 1)
    images = [torch.randn(3, side * height, side * width) for height, width in sizes]
    given_sizes = torch.tensor([image.shape[1:] for image in images])
    with torch.no_grad():
        expected = reference.get_image_features(
            padded(images), image_sizes=given_sizes
        ).pooler_output
    found = model.encode("image", [{"pixel_values": image} for image in images])
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_layers_after_the_selected_one_are_not_read(tmp_path: Path) -> None:
    config = config_of("mistral3", {}, {"vision_feature_layer": 1})
    make_media_model("mistral3", **config).save_pretrained(tmp_path)
    _, used = built_model(Mistral3, tmp_path)
    stored = load_file(tmp_path / "model.safetensors").keys()
    left_out = {name for name in stored if ".layers.1." in name or ".layers.2." in name}
    assert used == stored - {name for name in left_out if "vision_tower" in name}


def test_only_the_first_stage_has_a_tower(pair: Any) -> None:
    kind, _, folder = pair
    _, used = built_model(MODELS[kind], folder, layers=range(1, 2))
    assert not any("vision_tower" in name or "projector" in name for name in used)


def write(kind: str, folder: Path) -> MediaReference:
    """Write a model with a processor of images of at most 24 pixels."""
    strategy = {"vision_feature_layer": -1} if kind == "llava" else {}
    model = make_media_model(kind, **config_of(kind, {}, strategy))
    model.save_pretrained(folder)
    marks = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    merged = model.config.spatial_merge_size if kind == "mistral3" else 1
    processor = pixtral_processor(
        make_tokenizer(marks, "[IMG]"), patch_size=PATCH, merged=merged, longest_edge=24
    )
    processor.save_pretrained(folder)

    def inputs(one: Prompt) -> Mapping[str, Tensor]:
        images = one.get("multi_modal_data", {}).get("image")
        return processor(text=one["prompt"], images=images, return_tensors="pt")

    return MediaReference(folder, model, inputs)


@pytest.fixture(scope="module", params=["mistral3", "llava"])
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(request.param, tmp_path_factory.mktemp(request.param))


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}


@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(family: MediaReference, chosen: dict[str, Any]) -> None:
    check_media(family, some_prompts("[IMG]"), repeats=2, **chosen)


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks(tmp_path: Path, split: str) -> None:
    reference = write("mistral3", tmp_path)
    check_media(reference, some_prompts("[IMG]")[:1], num_tokens=3, **{split: 2})


@pytest.mark.parametrize(
    ("kind", "vision", "more", "message"),
    [
        (Mistral3, {"model_type": "siglip_vision_model"}, {}, "supported: pixtral"),
        (Mistral3, {}, {"vision_feature_layer": [0, 1]}, "features of one layer"),
        (Mistral3, {}, {"spatial_merge_size": 0}, "spatial_merge_size=0; expected a positive"),
        (Mistral3, {"rope_parameters": {"rope_type": "yarn"}}, {}, "rotary embeddings 'yarn'"),
        (Mistral3, {"hidden_size": 18}, {}, "of 6 channels; expected 'axial' of a multiple of 4"),
        (Mistral3, {"hidden_act": "sine"}, {}, "unknown activation 'sine'"),
        (Llava, {}, {"vision_feature_select_strategy": "default"}, "strategy='full'"),
        (LlavaNext, {}, {}, "'pixtral'; supported: clip_vision_model"),
    ],
)
def test_configs_that_are_refused(
    kind: Any, vision: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    config = config_of("mistral3", vision, more)
    with pytest.raises(ModelError, match=message):
        kind(config, fake_build(models=language_model))


def test_sizes_that_a_vision_config_lacks() -> None:
    from transformers import AutoConfig

    assert DEFAULTS["pixtral"].items() <= AutoConfig.for_model("pixtral").to_dict().items()
