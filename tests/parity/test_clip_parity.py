"""CLIP: the vectors of texts and images, as transformers makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_clip.clip import Clip
from tiny_media import MEDIA_TEXT, VISION, open_media_llm, random_model
from tiny_models import VOCAB_SIZE, divide
from tiny_vectors import check_vectors, expected_vector, picture
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build

SIDE = VISION["image_size"]
BEGIN = VOCAB_SIZE - 2
END = VOCAB_SIZE - 1
TEXT = {
    name: value
    for name, value in MEDIA_TEXT.items()
    if name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
}
TEXTS = ["w1", "w5 w6 w7 w8", " ".join(f"w{number}" for number in range(1, 40)), ""]


def write(folder: Path, **text: Any) -> Any:
    """Write a CLIP with its processor and tokenizer, and return the model."""
    sizes = {"num_hidden_layers": 3, "max_position_embeddings": 48}
    ids = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": 0}
    model = random_model(
        AutoModel,
        "clip",
        text_config={**TEXT, **sizes, **ids, **text},
        vision_config=VISION,
        projection_dim=20,
    )
    model.save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    ).save_pretrained(folder)
    vocabulary = {f"w{number}": number for number in range(BEGIN)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<b>", "<e>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<b> $A <e>", special_tokens=[("<b>", BEGIN), ("<e>", END)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", bos_token="<b>", eos_token="<e>"
    ).save_pretrained(folder)
    return model


def expected(model: Any, folder: Path, prompt: Any) -> torch.Tensor:
    """Return the normalized vector that transformers makes of a text or an image."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    images = CLIPImageProcessorPil.from_pretrained(folder)
    return expected_vector(model, images, tokenizer.encode, prompt)


def check(model: Any, folder: Path, **chosen: Any) -> None:
    check_vectors(lambda one: expected(model, folder, one), folder, TEXTS, **chosen)


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS.keys())
def test_vectors(tmp_path: Path, chosen: dict[str, Any]) -> None:
    check(write(tmp_path), tmp_path, **chosen)


@pytest.mark.parametrize("more", [{"hidden_act": "gelu"}, {"layer_norm_eps": 0.1}])
def test_other_layers(tmp_path: Path, more: dict[str, Any]) -> None:
    check(write(tmp_path, **more), tmp_path)


def test_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2, 1)
    check(write(tmp_path), tmp_path)


def test_prompts_that_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    both = {**picture(9, 9), "prompt": "w1 w2"}
    pictures = {"prompt": "", "multi_modal_data": {"image": [random_image(9, 9)] * 2}}
    long = " ".join(["w3"] * 60)
    with open_media_llm(tmp_path, runner="pooling") as llm:
        for one, message in (
            (both, "1 images and 4 tokens of text; CLIP makes a vector of one image"),
            (pictures, "2 images and 0 tokens of text"),
            (long, "48"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.embed([one], use_tqdm=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"text_config": {"hidden_size": 30}}, "hidden_size=30, which is not a multiple"),
        ({"text_config": {"vocab_size": "many"}}, "vocab_size='many'; expected a int"),
        ({"text_config": {"hidden_act": "swish"}}, "unknown activation 'swish'"),
        ({"projection_dim": 0}, "projection_dim=0; expected a positive"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "supported: clip_vision_model"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Clip(config, fake_build())


def test_layers_are_not_divided() -> None:
    with pytest.raises(ModelError, match="cannot be divided among pipeline stages"):
        Clip({}, fake_build(layers=range(1, 2)))
