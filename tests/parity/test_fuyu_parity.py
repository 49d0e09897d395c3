"""Fuyu: the rows of transformers, and its logits with images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_fuyu.fuyu import Fuyu
from safetensors.torch import load_file, save_file
from tiny_media import (
    MEDIA_TEXT,
    MediaParity,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    make_media_model,
    make_tokenizer,
    some_prompts,
)
from tokenizers.processors import TemplateProcessing
from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil

from pegboard_testing.media_peers import fuyu_processor

PATCH = 10
SPECIAL = ["|SPEAKER|", "|NEWLINE|", "<s>", "<0x04>"]
IMAGE, NEWLINE, BEGIN, ANSWER = range(100, 104)
FIRST = 99
CONFIG: dict[str, Any] = {
    "text_config": {"model_type": "persimmon", **MEDIA_TEXT, "num_key_value_heads": 4},
    "patch_size": PATCH,
    "image_token_id": IMAGE,
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
                seen = self.model.model.get_image_features(given["pixel_values"])
                rows[:, : prompt.shape[1]][prompt == IMAGE] = seen.last_hidden_state
            logits = self.model(inputs_embeds=rows).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def write(folder: Path, **more: Any) -> MediaReference:
    model = make_media_model("fuyu", **{**CONFIG, **more})
    model.save_pretrained(folder)
    side = {"height": PATCH, "width": PATCH}
    images = FuyuImageProcessorPil(size={"height": 30, "width": 40}, patch_size=side)
    images.save_pretrained(folder)
    tokenizer = make_tokenizer(SPECIAL, "")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"w{FIRST} $A", special_tokens=[(f"w{FIRST}", FIRST)]
    )
    tokenizer.save_pretrained(folder)
    theirs = fuyu_processor(images, tokenizer)

    def inputs(one: Prompt) -> Mapping[str, Any]:
        given = one.get("multi_modal_data", {}).get("image", [])
        if not given:
            return {"input_ids": torch.tensor([tokenizer.encode(one["prompt"])])}
        arrays, texts = theirs._process_images(
            given, return_legacy_image_output=False, return_tensors="pt"
        )
        marks = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        words = tokenizer.encode(one["prompt"], add_special_tokens=False)
        ids = [*sum(marks, []), *words, ANSWER]
        return {"input_ids": torch.tensor([ids]), "pixel_values": arrays["pixel_values"]}

    return Embedded(folder, model, inputs)


def in_memory(name: str) -> str:
    """Return what transformers 5 calls a tensor in memory. name: in a file."""
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return f"model.{name}".replace("language_model.model.", "language_model.")


LAYOUTS = {"published": str, "in memory": in_memory}


@pytest.fixture(scope="module", params=LAYOUTS)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    folder = tmp_path_factory.mktemp("fuyu")
    reference = write(folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    assert "language_model.model.layers.0.self_attn.dense.weight" in stored
    tensors = {LAYOUTS[request.param](name): value for name, value in stored.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return reference


def test_rows(reference: MediaReference) -> None:
    """All tensors are read."""
    ours, used = built_model(Fuyu, reference.directory)
    patches = torch.randn(7, 3 * PATCH**2)
    with torch.no_grad():
        expected = reference.model.model.get_image_features(patches).last_hidden_state
    rows = ours.encode("image", [{"patches": patches[:3]}, {"patches": patches[3:]}])
    assert [len(each) for each in rows] == [3, 4]
    torch.testing.assert_close(torch.cat([*rows]), expected, atol=1e-4, rtol=1e-4)
    assert used == load_file(reference.directory / "model.safetensors").keys()
    _, later = built_model(Fuyu, reference.directory, layers=range(1, 2))
    assert not any("vision" in name for name in later)


class TestParity(MediaParity):
    prompts = staticmethod(lambda: some_prompts(""))
    part = 8


def test_a_flat_config(tmp_path: Path) -> None:
    """The published config has the values of the language model beside the others."""
    text = {**CONFIG["text_config"], "rope_theta": 500.0, "qk_layernorm": False}
    reference = write(tmp_path, text_config=text)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text("utf-8"))
    inner = config.pop("text_config")
    theta = inner.pop("rope_parameters")["rope_theta"]
    assert theta == 500.0
    flat = {**inner, **config, "rope_theta": theta}
    file.write_text(json.dumps(flat), "utf-8")
    check_media(reference, some_prompts("")[:3], num_tokens=3)
