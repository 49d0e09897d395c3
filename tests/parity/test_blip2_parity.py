"""BLIP-2: the rows of transformers, its logits with images, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_blip2.blip2 import Blip2
from safetensors.torch import load_file
from tiny_media import (
    MEDIA_TEXT,
    VISION,
    MediaParity,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    make_media_model,
    make_tokenizer,
    open_media_llm,
    some_prompts,
)
from tiny_models import divide
from tokenizers.processors import TemplateProcessing
from transformers import Blip2Processor
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from pegboard import SamplingParams
from pegboard.errors import ModelError
from pegboard_testing.contract_multimodal_processor import random_image

SIZE = VISION["image_size"]
ROWS = 6
BEGIN = 99
CONFIG: dict[str, Any] = {
    "text_config": {
        "model_type": "opt",
        "ffn_dim": 48,
        "word_embed_proj_dim": MEDIA_TEXT["hidden_size"],
        "num_hidden_layers": 3,
        **{n: MEDIA_TEXT[n] for n in ("vocab_size", "hidden_size", "num_attention_heads")},
        "max_position_embeddings": 512,
    },
    "vision_config": VISION,
    "qformer_config": {
        "hidden_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 28,
    },
    "num_query_tokens": ROWS,
    "image_token_index": 100,
}


class Embedded(MediaReference):
    """The language model gets embeddings, because it can answer without an image, and because its
    outputs may be the token of images."""

    def logprobs(self, one: Prompt, outputs: Any) -> torch.Tensor:
        given = dict(self.inputs(one))
        ids = torch.cat([given["input_ids"], torch.tensor([list(outputs)]).long()], 1)
        with torch.no_grad():
            rows = self.model.get_input_embeddings()(ids)
            if "pixel_values" in given:
                features = self.model.get_image_features(given["pixel_values"]).pooler_output
                seen = features.flatten(0, 1)
                rows[0, : len(seen)] = seen
            logits = self.model.language_model(inputs_embeds=rows).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def with_begin(tokenizer: Any) -> Any:
    """Let every text begin with a token, as those of OPT do."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"w{BEGIN} $A", special_tokens=[(f"w{BEGIN}", BEGIN)]
    )
    return tokenizer


def write(folder: Path, **more: Any) -> MediaReference:
    model = make_media_model("blip-2", **{**CONFIG, **more})
    model.save_pretrained(folder)
    images = BlipImageProcessorPil(size={"height": SIZE, "width": SIZE})
    tokenizer = with_begin(make_tokenizer(["<image>"], ""))
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    theirs = Blip2Processor(images, tokenizer, num_query_tokens=ROWS)

    def inputs(one: Prompt) -> Mapping[str, Any]:
        given = one.get("multi_modal_data", {}).get("image")
        arrays = dict(theirs(images=given, text=one["prompt"], return_tensors="pt"))
        others = [100] * (ROWS * (len(given or [0]) - 1))
        ids = torch.cat([torch.tensor([others]).long(), arrays["input_ids"]], 1)
        return {**arrays, "input_ids": ids}

    return Embedded(folder, model, inputs)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(tmp_path_factory.mktemp("blip2"))


def check_rows(reference: MediaReference) -> None:
    ours, used = built_model(Blip2, reference.directory)
    pixels = torch.randn(3, 3, SIZE, SIZE)
    with torch.no_grad():
        expected = reference.model.get_image_features(pixels).pooler_output
    rows = ours.encode("image", [{"pixel_values": each} for each in pixels])
    torch.testing.assert_close(torch.stack([*rows]), expected, atol=1e-4, rtol=1e-4)
    assert used == load_file(reference.directory / "model.safetensors").keys()


def test_rows(reference: MediaReference) -> None:
    """All tensors are read."""
    check_rows(reference)


MORE: dict[str, dict[str, Any]] = {
    "no bias": {"vision_config": {**VISION, "qkv_bias": False}},
    "relu": {
        "vision_config": {**VISION, "hidden_act": "relu", "layer_norm_eps": 1e-2},
        "qformer_config": {
            **CONFIG["qformer_config"],
            "hidden_act": "relu",
            "cross_attention_frequency": 1,
            "layer_norm_eps": 1e-2,
        },
    },
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE.keys())
def test_other_towers(tmp_path: Path, more: dict[str, Any]) -> None:
    check_rows(write(tmp_path, **more))


def test_the_tensors_of_a_later_part(reference: MediaReference) -> None:
    _, used = built_model(Blip2, reference.directory, layers=range(1, 2))
    assert not any(name.startswith(("vision", "qformer", "query")) for name in used)


class TestParity(MediaParity):
    prompts = staticmethod(lambda: some_prompts(""))
    part = 8


def test_another_language_model(tmp_path: Path) -> None:
    text = {"model_type": "llama", **MEDIA_TEXT}
    check_media(write(tmp_path, text_config=text), some_prompts("")[:3], num_tokens=3)


def test_values_that_the_text_config_lacks(tmp_path: Path) -> None:
    """Its head is the embedding."""
    reference = write(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text("utf-8"))
    text = config["text_config"]
    for name in ("tie_word_embeddings", "activation_function", "word_embed_proj_dim"):
        del text[name]
    file.write_text(json.dumps(config), "utf-8")
    assert not any("lm_head" in name for name in load_file(tmp_path / "model.safetensors"))
    check_media(reference, some_prompts("")[:3], num_tokens=3)


def test_divided(reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2, 2)
    check_media(reference, some_prompts(""), num_tokens=3)


def test_a_chat(reference: MediaReference) -> None:
    """The image is first, wherever the message has it."""
    image = random_image(20, 13)
    parts: list[Any] = [{"type": "text", "text": "w5"}, {"type": "image_pil", "image_pil": image}]
    with open_media_llm(reference.directory) as llm:
        (output,) = llm.chat(
            [{"role": "user", "content": parts}], SamplingParams(max_tokens=1), use_tqdm=False
        )
    assert output.prompt_token_ids == [*[100] * ROWS, 1, 5, 3]


def test_a_language_model_with_an_encoder_is_refused(reference: MediaReference) -> None:
    config = {**CONFIG, "text_config": {"model_type": "t5"}}
    with pytest.raises(ModelError, match="'t5', whose prompts go to an encoder"):
        Blip2(config, None)  # type: ignore[arg-type]


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    reference = write(tmp_path)
    config = reference.model.config
    config.qformer_config.num_attention_heads = 3
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="qformer_config has hidden_size=20; expected a multiple"):
        built_model(Blip2, tmp_path)
