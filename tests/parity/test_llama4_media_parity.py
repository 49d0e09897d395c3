"""Llama 4 with images: the rows of transformers, and its logits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_llama4.llama4 import Llama4
from pegboard_model_llama4.processor import Llama4Processor
from safetensors.torch import load_file
from test_experts_parity import LLAMA4
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    make_media_model,
    make_tokenizer,
    some_prompts,
)
from tiny_models import divide

from pegboard_testing.media_peers import PeerTokenizer, image_setup
from pegboard_weights.hf_files import read_config

SIDE = 16
MARK = "<|image|>"
SPECIAL = [
    MARK,
    "<|patch|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
]
WHOLE, PATCH = 100, 101
VISION = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "image_size": SIDE,
    "patch_size": 4,
    "projector_input_dim": 20,
    "projector_output_dim": 20,
    "vision_output_dim": 20,
}


class Embedded(MediaReference):
    """The model gets embeddings, because its outputs may be the token of patches."""

    def logprobs(self, one: Prompt, outputs: Any) -> torch.Tensor:
        given = dict(self.inputs(one))
        prompt = given["input_ids"]
        ids = torch.cat([prompt, torch.tensor([list(outputs)]).long()], 1)
        with torch.no_grad():
            rows = self.model.get_input_embeddings()(ids)
            if "pixel_values" in given:
                seen = rows_of(self.model, given["pixel_values"]).flatten(0, 1)
                rows[:, : prompt.shape[1]][prompt == PATCH] = seen
            logits = self.model(inputs_embeds=rows).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def rows_of(model: Any, tiles: torch.Tensor) -> Any:
    """Return the rows [tiles, rows, hidden] of tiles."""
    return model.multi_modal_projector(model.get_image_features(tiles).last_hidden_state)


def write(folder: Path, **vision: Any) -> MediaReference:
    model = make_media_model(
        "llama4",
        text_config={"model_type": "llama4_text", **MEDIA_TEXT, **LLAMA4},
        vision_config={**VISION, **vision},
        image_token_index=PATCH,
    )
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(SPECIAL, MARK)
    tokenizer.save_pretrained(folder)
    file = {"size": {"height": SIDE, "width": SIDE}, "max_patches": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(file))
    setup = image_setup(folder, read_config(folder), [])
    object.__setattr__(setup, "tokenizer", PeerTokenizer(tokenizer))
    ours = Llama4Processor(None, setup)

    def inputs(one: Prompt) -> Mapping[str, Any]:
        """The processor's own tests compare it with that of transformers."""
        given = one.get("multi_modal_data", {}).get("image", [])
        items = iter([ours.process("image", image, {}) for image in given])
        ids: list[int] = []
        tiles = []
        for token in tokenizer.encode(one["prompt"]):
            if token == WHOLE:
                item = next(items)
                ids += item.token_ids
                tiles.append(torch.from_numpy(item.arrays["pixel_values"]))
            else:
                ids.append(token)
        arrays = {"pixel_values": torch.cat(tiles)} if tiles else {}
        return {"input_ids": torch.tensor([ids]), **arrays}

    return Embedded(folder, model, inputs)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(tmp_path_factory.mktemp("llama4"))


def check_rows(reference: MediaReference, counts: list[int]) -> None:
    ours, _ = built_model(Llama4, reference.directory)
    images = [torch.randn(count, 3, SIDE, SIDE) for count in counts]
    found = ours.encode("image", [{"pixel_values": image} for image in images])
    for image, rows in zip(images, found, strict=True):
        with torch.no_grad():
            expected = rows_of(reference.model, image).flatten(0, 1)
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=10, deadline=None)
def test_rows(reference: MediaReference, counts: list[int]) -> None:
    check_rows(reference, counts)


@pytest.mark.parametrize(("ratio", "width"), [(1.0, 24), (0.25, 384)])
def test_other_blocks(tmp_path: Path, ratio: float, width: int) -> None:
    more = {"pixel_shuffle_ratio": ratio, "intermediate_size": width}
    check_rows(write(tmp_path, **more, rope_parameters={"rope_theta": 50.0}), [2, 1])


def test_the_tensors_that_are_read(reference: MediaReference) -> None:
    _, used = built_model(Llama4, reference.directory)
    assert used == load_file(reference.directory / "model.safetensors").keys()
    _, later = built_model(Llama4, reference.directory, layers=range(1, 2))
    assert not any("vision" in name or "multi_modal" in name for name in later)


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(reference: MediaReference, settings: dict[str, Any]) -> None:
    """Twice: the second time, the prefixes are in the cache."""
    check_media(reference, some_prompts(MARK), repeats=2, **settings)


def test_divided(reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2, 2)
    check_media(reference, some_prompts(MARK), num_tokens=3)
