"""InternVL in the form that its authors publish, compared with transformers, whose tensors and
config get the published names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_internvl.internvl import InternVLChat
from pegboard_model_internvl.sizes import TOWER, standard
from pegboard_model_internvl.tiles import DEVIATION, MEAN
from safetensors.torch import load_file, save_file
from test_dense_families import internlm2
from tiny_media import (
    MEDIA_TEXT,
    VISION,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    language_model,
    make_media_model,
    make_tokenizer,
    open_media_llm,
    some_prompts,
)
from tiny_models import divide
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from pegboard.errors import ModelError
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build
from pegboard_testing.media_peers import internvl_processor

IMAGE = 100
SIDE = VISION["image_size"]
MARK = "<IMG_CONTEXT>"
TILES = {"min_dynamic_patch": 1, "max_dynamic_patch": 3}
TEXTS: dict[str, tuple[str, str]] = {
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "internlm2": ("llama", "InternLM2ForCausalLM"),
}
"""The language model: transformers' type, and the published architecture."""
TEXT = {**MEDIA_TEXT, "head_dim": MEDIA_TEXT["hidden_size"] // MEDIA_TEXT["num_attention_heads"]}
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layer norms": ({"qkv_bias": True, "qk_normalization": False, "norm_type": "layer_norm"}, {}),
    "norms of queries": ({"layer_norm_eps": 0.1}, {"downsample_ratio": 0.25}),
    "earlier layer": ({"norm_type": "layer_norm"}, {"select_layer": -3}),
}
NAMES = {
    r"^vision_tower\.": "vision_model.",
    r"encoder\.layer\.": "encoder.layers.",
    r"cls_token": "class_embedding",
    r"position_embeddings": "position_embedding",
    r"patch_embeddings\.projection": "patch_embedding",
    r"lambda_(\d)": r"ls\1",
    r"attention\.projection_layer": "attn.proj",
    r"\.attention\.": ".attn.",
    r"layernorm_before": "norm1",
    r"layernorm_after": "norm2",
    r"^multi_modal_projector\.layer_norm": "mlp1.0",
    r"^multi_modal_projector\.linear_1": "mlp1.1",
    r"^multi_modal_projector\.linear_2": "mlp1.3",
}
PARTS = ("q_proj", "k_proj", "v_proj")


def published(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Return the tensors of transformers with the published names."""
    prefix = "language_model."
    text = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    if architecture == "InternLM2ForCausalLM":
        text = internlm2(text, None)
    renamed = {f"{prefix}{name}": tensor.contiguous() for name, tensor in text.items()}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            continue
        if ".q_proj" in name:
            values = [tensors[name.replace("q_proj", part)] for part in PARTS]
            name, tensor = name.replace("q_proj", "qkv"), torch.cat(values)
        elif any(part in name for part in PARTS):
            continue
        for pattern, new in NAMES.items():
            name = re.sub(pattern, new, name)
        renamed[name] = tensor
    return renamed


def config_of(text: str = "qwen2", tower: str = "layer norms", **more: Any) -> dict[str, Any]:
    """Return a published config."""
    model_type, architecture = TEXTS[text]
    vision, beside = TOWERS[tower]
    return {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "llm_config": {
            **TEXT,
            "model_type": text if text == "internlm2" else model_type,
            "architectures": [architecture],
            "tie_word_embeddings": False,
            "bias": False,
        },
        "vision_config": {
            **VISION,
            "model_type": "intern_vit_6b",
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
            **vision,
        },
        "torch_dtype": "float32",
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "select_layer": -1,
        "force_image_size": SIDE,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "pad2square": False,
        **TILES,
        **beside,
        **more,
    }


def write(folder: Path, text: str = "qwen2", tower: str = "layer norms") -> MediaReference:
    config = config_of(text, tower)
    model_type, architecture = TEXTS[text]
    new = standard(config)
    model = make_media_model(
        "internvl",
        text_config={"model_type": model_type, **TEXT},
        vision_config=new["vision_config"],
        image_token_id=IMAGE,
        tie_word_embeddings=False,
        **{
            name: new[name]
            for name in ("downsample_ratio", "vision_feature_layer", "projector_hidden_act")
        },
    )
    for name, module in model.named_modules():
        if "vision" in name and name.endswith(("q_norm", "k_norm")):
            module.variance_epsilon = config["vision_config"]["layer_norm_eps"]
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(published(load_file(file), architecture), file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    CLIPImageProcessorPil().save_pretrained(folder)
    tokenizer = make_tokenizer([MARK, "<img>", "</img>", "<video>"], MARK)
    tokenizer.save_pretrained(folder)
    images = GotOcr2ImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        crop_to_patches=True,
        max_patches=TILES["max_dynamic_patch"],
        image_mean=MEAN,
        image_std=DEVIATION,
    )
    rows = int((SIDE // VISION["patch_size"] * config["downsample_ratio"]) ** 2)
    processor = internvl_processor(images, tokenizer, rows=rows)

    def inputs(one: Prompt) -> Mapping[str, Tensor]:
        given = one.get("multi_modal_data", {}).get("image")
        return processor(text=one["prompt"], images=given, return_tensors="pt")

    return MediaReference(folder, model, inputs)


@pytest.fixture(scope="module", params=TOWERS)
def tower(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(tmp_path_factory.mktemp("tower"), tower=request.param)


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
@settings(max_examples=6, deadline=None)
def test_rows(tower: MediaReference, counts: list[int]) -> None:
    ours, _ = built_model(InternVLChat, tower.directory)
    images = [torch.randn(count, 3, SIDE, SIDE) for count in counts]
    rows = ours.encode("image", [{"pixel_values": image} for image in images])
    for image, own in zip(images, rows, strict=True):
        with torch.no_grad():
            theirs = tower.model.get_image_features(image).pooler_output
        torch.testing.assert_close(own, theirs.flatten(0, 1), atol=1e-4, rtol=1e-4)


def test_the_tensors_that_are_read(tower: MediaReference) -> None:
    """All but the layers of the tower after the selected one."""
    _, used = built_model(InternVLChat, tower.directory)
    left = load_file(tower.directory / "model.safetensors").keys() - used
    is_cut = tower.model.config.vision_feature_layer != -1
    assert bool(left) == is_cut
    assert all(re.match(r"vision_model\.encoder\.layers\.[12]\.", name) for name in left)
    _, later = built_model(InternVLChat, tower.directory, layers=range(1, 2))
    assert not any(name.startswith(("vision_model", "mlp1")) for name in later)


@pytest.fixture(scope="module", params=TEXTS)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(tmp_path_factory.mktemp("text"), request.param)


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(reference: MediaReference, chosen: dict[str, Any]) -> None:
    """Twice: the second time, the prefixes are in the cache."""
    check_media(reference, some_prompts(MARK), repeats=2, **chosen)


def test_divided(reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2, 2)
    check_media(reference, some_prompts(MARK), num_tokens=3)


def test_a_chat(tmp_path: Path) -> None:
    """A template that knows images writes the placeholder."""
    write(tmp_path)
    picture = {"type": "image_pil", "image_pil": random_image(40, 20)}
    words = {"type": "text", "text": "w7"}
    with open_media_llm(tmp_path) as llm:
        (output,) = llm.chat([{"role": "user", "content": [picture, words]}], use_tqdm=False)
    tokens = list(output.prompt_token_ids)
    assert tokens.count(IMAGE) == 4 * 3
    assert tokens[:3] == [1, 101, IMAGE]


@pytest.mark.parametrize(
    ("vision", "more", "message"),
    [
        ({}, {"ps_version": "v1"}, "ps_version='v1'; expected 'v2'"),
        ({}, {"pad2square": True}, "pad2square=True; expected false"),
        ({}, {"force_image_size": 448}, "force_image_size=448, and its vision_config has image_si"),
        ({}, {"downsample_ratio": 0.3}, "downsample_ratio=0.3; expected 1, 0.5"),
        ({}, {"select_layer": 7}, "vision_feature_layer=7; expected a number"),
        ({"qkv_bias": 1}, {}, "vision_config has qkv_bias=1; expected true or false"),
        ({"qk_normalization": None}, {}, "qk_normalization=None; expected true or false"),
        ({"num_channels": 1}, {}, "num_channels=1; expected 3"),
        ({"norm_type": "none"}, {}, "norm_type='none'; expected one of layer_norm"),
        ({"model_type": "siglip_vision_model"}, {}, "is 'siglip_vision_model'; supported: intern"),
        ({"hidden_act": "swish"}, {}, "unknown activation 'swish'"),
    ],
)
def test_configs_that_are_refused(
    vision: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    config = config_of(**more)
    config["text_config"] = config["llm_config"]
    config["vision_config"] |= vision
    with pytest.raises(ModelError, match=message):
        InternVLChat(config, fake_build(models=language_model))


def test_a_config_without_values() -> None:
    """InternViT-6B, as the published code says."""
    config = standard({"ps_version": "v2", "vision_config": {}})
    assert TOWER.items() <= config["vision_config"].items()
    assert config["vision_feature_layer"] == -1
