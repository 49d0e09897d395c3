"""Aria: the rows of transformers, its logits with images, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_aria.aria import Aria
from pegboard_model_aria.processor import AriaProcessor
from safetensors.torch import load_file, save_file
from tiny_media import (
    MEDIA_TEXT,
    MediaParity,
    MediaReference,
    Prompt,
    built_model,
    make_media_model,
    make_tokenizer,
    some_prompts,
)
from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil

from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.media_peers import image_setup

SIDE = 490
PATCH = 70
GRID = 7
MARK = "<|img|>"
IMAGE = 100
ROWS = 5
CONFIG: dict[str, Any] = {
    "text_config": {
        "model_type": "aria_text",
        **MEDIA_TEXT,
        "moe_num_experts": 4,
        "moe_topk": 2,
        "moe_num_shared_experts": 2,
    },
    "vision_config": {
        "model_type": "idefics3_vision",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": 6 * PATCH,
        "patch_size": PATCH,
    },
    "image_token_index": IMAGE,
    "projector_patch_to_query_dict": {GRID**2: ROWS, 4: 9},
}


class Embedded(MediaReference):
    """The model gets embeddings, because its outputs may be the token of images."""

    def logprobs(self, one: Prompt, outputs: Any) -> torch.Tensor:
        given = dict(self.inputs(one))
        prompt = given["input_ids"]
        ids = torch.cat([prompt, torch.tensor([list(outputs)]).long()], 1)
        with torch.no_grad():
            rows = self.model.get_input_embeddings()(ids)
            if "pixel_values" in given:
                features = self.model.model.get_image_features(
                    given["pixel_values"], given["pixel_mask"]
                )
                seen = features.pooler_output.flatten(0, 1)
                rows[:, : prompt.shape[1]][prompt == IMAGE] = seen
            logits = self.model(inputs_embeds=rows).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def write(folder: Path, **more: Any) -> MediaReference:
    model = make_media_model("aria", **{**CONFIG, **more})
    model.save_pretrained(folder)
    images = AriaImageProcessorPil(max_image_size=SIDE)
    images.save_pretrained(folder)
    tokenizer = make_tokenizer([MARK], MARK)
    tokenizer.save_pretrained(folder)

    def inputs(one: Prompt) -> Mapping[str, Any]:
        given = one.get("multi_modal_data", {}).get("image", [])
        arrays: dict[str, Any] = dict(images(given, return_tensors="pt")) if given else {}
        ids: list[int] = []
        for token in tokenizer.encode(one["prompt"]):
            ids += [token] * (ROWS if token == IMAGE else 1)
        return {"input_ids": torch.tensor([ids]), **arrays}

    return Embedded(folder, model, inputs)


def renamed(name: str) -> str:
    """Return what transformers 5 calls a tensor in memory. name: in a file."""
    whole = name.replace("fc1.weight", "gate_up_proj").replace("fc2.weight", "down_proj")
    if ".experts." not in name:
        whole = name
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return f"model.{whole}".replace("language_model.model.", "language_model.")


LAYOUTS = {"published": str, "in memory": renamed}


@pytest.fixture(scope="module", params=LAYOUTS)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    folder = tmp_path_factory.mktemp("aria")
    reference = write(folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    assert "language_model.model.layers.0.mlp.experts.fc1.weight" in stored
    tensors = {LAYOUTS[request.param](name): value for name, value in stored.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return reference


shapes = st.lists(st.tuples(st.integers(1, GRID), st.integers(1, GRID)), min_size=1, max_size=4)


@given(shapes)
@settings(max_examples=15, deadline=None)
def test_rows(reference: MediaReference, shapes: list[tuple[int, int]]) -> None:
    """Of tiles that show something in some of their patches."""
    ours, _ = built_model(Aria, reference.directory)
    check_rows(ours, reference, shapes)


def check_rows(ours: Any, reference: MediaReference, shapes: list[tuple[int, int]]) -> None:
    pixels = torch.randn(len(shapes), 3, SIDE, SIDE)
    masks = torch.zeros(len(shapes), SIDE, SIDE, dtype=torch.bool)
    for mask, (height, width) in zip(masks, shapes, strict=True):
        mask[: height * PATCH, : width * PATCH] = True
    layer = reference.model.config.vision_feature_layer
    with torch.no_grad():
        features = reference.model.model.get_image_features(
            pixels, masks, vision_feature_layer=layer
        )
    items = [
        {"pixel_values": pixels[:1], "patches": torch.tensor(shapes[:1])},
        {"pixel_values": pixels[1:], "patches": torch.tensor(shapes[1:])},
    ]
    items = items if len(shapes) > 1 else items[:1]
    rows = torch.cat([*ours.encode("image", items)])
    torch.testing.assert_close(rows, features.pooler_output.flatten(0, 1), atol=1e-4, rtol=1e-4)


def test_an_earlier_layer(tmp_path: Path) -> None:
    reference = write(tmp_path, vision_feature_layer=1)
    ours, used = built_model(Aria, tmp_path)
    check_rows(ours, reference, [(3, 2), (7, 7)])
    assert not any("vision_tower.encoder.layers.1." in name for name in used)


def test_the_tensors_that_are_read(reference: MediaReference) -> None:
    """All but the norm after the last layer."""
    _, used = built_model(Aria, reference.directory)
    left = load_file(reference.directory / "model.safetensors").keys() - used
    assert all("vision_tower.post_layernorm" in name for name in left)
    _, later = built_model(Aria, reference.directory, layers=range(1, 2))
    assert not any("vision" in name or "multi_modal" in name for name in later)


class TestParity(MediaParity):
    prompts = staticmethod(lambda: some_prompts(MARK))


def test_the_processor_and_the_model(reference: MediaReference) -> None:
    """Of wide and tall images, and of small ones."""
    ours, _ = built_model(Aria, reference.directory)
    processor = AriaProcessor(None, image_setup(reference.directory, CONFIG, [MARK]))
    images = AriaImageProcessorPil(max_image_size=SIDE)
    for size in ((900, 30), (20, 600), (500, 400), (1, 1)):
        image = random_image(*size)
        arrays = processor.process("image", image, {}).arrays
        found = ours.encode("image", [{n: torch.from_numpy(v) for n, v in arrays.items()}])[0]
        given = images([image], return_tensors="pt")
        with torch.no_grad():
            features = reference.model.model.get_image_features(
                given["pixel_values"], given["pixel_mask"]
            )
        torch.testing.assert_close(found, features.pooler_output[0], atol=1e-4, rtol=1e-4)
