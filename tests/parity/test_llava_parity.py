"""LLaVA, compared with transformers: the rows of images, and the logits of prompts with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pegboard_model_llava.llava import Llava, LlavaNext, LlavaOnevision
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from pegboard import SamplingParams
from pegboard.errors import ModelError
from pegboard.layers import Build
from pegboard.plugins.importing import import_object, import_spec
from pegboard_models.language import SIZES
from pegboard_models.vision_sizes import DEFAULTS
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.fake_build import fake_build, load_layers
from pegboard_weights.hf_files import read_config, with_defaults

IMAGE_TOKEN = 98
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 23,
    "patch_size": 5,
}
TEXT = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 96,
}
TOWERS = {
    "clip_vision_model": {"projection_dim": 16},
    "siglip_vision_model": {"vision_use_head": False},
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "clip": ("clip_vision_model", {}, {}),
    "clip, gelu": ("clip_vision_model", {"hidden_act": "gelu"}, {"projector_hidden_act": "relu"}),
    "clip, full": (
        "clip_vision_model",
        {},
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    ),
    "clip, several": ("clip_vision_model", {}, {"vision_feature_layer": [-3, 0, 2]}),
    "siglip": (
        "siglip_vision_model",
        {},
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    ),
    "siglip, no bias": (
        "siglip_vision_model",
        {},
        {"multimodal_projector_bias": False, "vision_feature_layer": 1},
    ),
}
LAYOUTS: dict[str, Callable[[str], str]] = {
    "as written": lambda name: name,
    "older": lambda name: name.replace("vision_tower.", "vision_tower.vision_model."),
    "below model": lambda name: (
        name.replace("language_model.lm_head", "lm_head")
        if "lm_head" in name
        else f"model.{name}".replace("language_model.model.", "language_model.")
    ),
}


FAMILIES = {"llava": Llava, "llava_next": LlavaNext, "llava_onevision": LlavaOnevision}


def randomize(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Any]:
    """write(kind of tower, values of it, values of the whole, text's kind and values) → the model
    of transformers, whose checkpoint is in tmp_path."""

    def make(
        kind: str,
        vision: dict[str, Any],
        more: dict[str, Any],
        text: str = "llama",
        family: str = "Llava",
        **own: Any,
    ) -> Any:
        torch.manual_seed(5)
        for_model = transformers.AutoConfig.for_model
        config = getattr(transformers, f"{family}Config")(
            vision_config=for_model(kind, **VISION, **TOWERS[kind], **vision),
            text_config=for_model(text, **{**TEXT, **own}),
            image_token_index=IMAGE_TOKEN,
            **more,
        )
        architecture = f"{family}ForConditionalGeneration"
        model = getattr(transformers, architecture)(config).eval()
        randomize(model)
        model.save_pretrained(tmp_path)
        return model

    return make


def language_model(config: Any, build: Build) -> Any:
    entry = installed_entry("model", config["architectures"][0])
    return import_object(import_spec(entry).implementation)(config, build)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one request from its first token. All tensors are [T, heads, D]."""
    query, key, value = (part.transpose(0, 1)[None] for part in (q, k, v))
    mixed = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return mixed[0].transpose(0, 1).flatten(1)


def built(folder: Path, layout: str = "as written", **more: Any) -> tuple[Any, set[str]]:
    """Return our model with the checkpoint's tensors, and the names of those that it used."""
    tensors = {
        LAYOUTS[layout](name): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    build = fake_build(stored=tensors.keys(), models=language_model, **more)
    config = with_defaults(read_config(folder))
    model = FAMILIES[config["model_type"]](config, build)
    used = load_layers(build.declared.layers, tensors, bind=False)
    build.attention.update(dict.fromkeys(build.declared.attention, attend))
    for layer in build.declared.layers:
        layer.bind()
    return model, used


def images(count: int) -> Tensor:
    return torch.randn(count, 3, VISION["image_size"], VISION["image_size"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_rows(write: Any, tmp_path: Path, name: str, layout: str) -> None:
    reference = write(*CASES[name])
    model, _ = built(tmp_path, layout)
    pixels = images(3)
    with torch.no_grad():
        expected = reference.get_image_features(pixels).pooler_output
    found = model.encode("image", [{"pixel_values": item} for item in pixels])
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    (alone,) = model.encode("image", [{"pixel_values": pixels[1]}])
    torch.testing.assert_close(alone, found[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 6}),
    ],
)
def test_logits(write: Any, tmp_path: Path, layout: str, text: str, more: dict[str, Any]) -> None:
    reference = write("clip_vision_model", {}, {}, text, **more)
    model, _ = built(tmp_path, layout)
    pixels = images(2)
    rows = model.encode("image", [{"pixel_values": item} for item in pixels])
    gap = [IMAGE_TOKEN] * len(rows[0])
    ids = torch.tensor([5, 9, *gap, 7, *gap, 3, 2])
    with torch.no_grad():
        expected = reference(input_ids=ids[None], pixel_values=pixels).logits[0]
    hidden = model.embed(ids).clone()
    hidden[ids == IMAGE_TOKEN] = torch.cat(rows)
    found = model.logits(model.forward(hidden, torch.arange(len(ids))))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


PINPOINTS = [[23, 46], [46, 23], [46, 46], [69, 23], [23, 69]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "family", "more"),
    [
        ("clip_vision_model", "LlavaNext", {}),
        ("siglip_vision_model", "LlavaNext", {}),
        ("siglip_vision_model", "LlavaOnevision", {"vision_feature_layer": -1}),
        ("siglip_vision_model", "LlavaOnevision", {"vision_aspect_ratio": "anyres_max_1"}),
    ],
)
def test_rows_of_tiles(
    write: Any, tmp_path: Path, kind: str, family: str, more: dict[str, Any], layout: str
) -> None:
    strategy = "default" if kind.startswith("clip") else "full"
    values = {"image_grid_pinpoints": PINPOINTS, "vision_feature_select_strategy": strategy}
    reference = write(kind, {}, {**values, **more}, family=family)
    model, _ = built(tmp_path, layout)
    sizes = [(50, 30), (23, 23), (200, 11), (7, 90), (40, 40), (31, 50)]
    items = []
    for size in sizes:
        rows, columns = model.tiling.tiles(size)
        pixels = images(1 + rows * columns)
        items.append({"pixel_values": pixels, "image_sizes": torch.tensor(size)})
    found = model.encode("image", items)
    for item, ours in zip(items, found, strict=True):
        with torch.no_grad():
            (theirs,) = reference.get_image_features(
                item["pixel_values"][None], item["image_sizes"][None]
            ).pooler_output
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_prompts_of_text(write: Any, tmp_path: Path, open_llm: Any, split: str, ranks: int) -> None:
    """An engine runs the model, also when ranks divide it."""
    reference = write("clip_vision_model", {}, {})
    llm = open_llm(tmp_path, **{split: ranks})
    prompt = [3, 5, 7, 90, 4]
    (request,) = llm.generate([prompt], SamplingParams(max_tokens=6, temperature=0))
    ids = prompt + list(request.outputs[0].token_ids)
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    assert expected.argmax(-1).tolist() == ids[len(prompt) :]


def test_layers_after_the_selected_one_are_not_read(write: Any, tmp_path: Path) -> None:
    write("clip_vision_model", {}, {})
    _, used = built(tmp_path)
    assert "vision_tower.encoder.layers.1.mlp.fc1.weight" in used
    assert not any(".layers.2." in name or "post_layernorm" in name for name in used)


def test_only_the_first_stage_has_a_tower(write: Any, tmp_path: Path) -> None:
    write("clip_vision_model", {}, {})
    _, used = built(tmp_path, layers=range(1, 2))
    assert not any("vision_tower" in name or "projector" in name for name in used)


@pytest.mark.parametrize("model_type", SIZES)
def test_sizes_that_a_text_config_lacks(model_type: str) -> None:
    theirs = transformers.AutoConfig.for_model(model_type).to_dict()
    assert SIZES[model_type].items() <= theirs.items()


@pytest.mark.parametrize("model_type", ["clip_vision_model", "siglip_vision_model"])
def test_sizes_that_a_vision_config_lacks(model_type: str) -> None:
    theirs = transformers.AutoConfig.for_model(model_type).to_dict()
    assert DEFAULTS[model_type].items() <= theirs.items()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_layer": 4}, "vision_feature_layer=4; expected a number from -4 to 3"),
        ({"vision_feature_layer": []}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "first"}, "expected 'default' or 'full'"),
        ({"vision_config": {"model_type": "pixtral"}}, "strategy='full'"),
        ({"vision_config": None}, "vision tower is None"),
        (
            {"vision_config": {"model_type": "clip_vision_model", "patch_size": "a"}},
            "patch_size='a'",
        ),
        (
            {"vision_config": {"model_type": "clip_vision_model", "num_attention_heads": 5}},
            "not a multiple of num_attention_heads=5",
        ),
        (
            {"vision_config": {"model_type": "clip_vision_model", "hidden_act": "sine"}},
            "unknown activation 'sine'",
        ),
        ({"text_config": {"model_type": "nothing"}}, "model_type='nothing'; expected arch"),
        ({"text_config": None}, "expected architectures"),
    ],
)
def test_configs_that_are_refused(
    write: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write("clip_vision_model", {}, {})
    build = fake_build(models=language_model)
    with pytest.raises(ModelError, match=message):
        Llava({**with_defaults(read_config(tmp_path)), **change}, build)
