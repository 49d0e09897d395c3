"""Models that read images: which of them run with transformers' modules, and why others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_transformers.media import check_merge, language_path, make_whole
from pegboard_model_transformers.media_processor import TransformersProcessor
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.media_peers import ImageContract, image_setup

SMALL_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def check(model_type: str, **config: Any) -> None:
    whole = make_whole({"model_type": model_type, **config}, torch.float32)
    width = whole.config.get_text_config(decoder=True).hidden_size
    check_merge(whole, language_path(whole.base_model), width)


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("llava", {"model_type": "llama"}),
        ("llava_next", {"model_type": "mistral"}),
        ("vipllava", {"model_type": "llama"}),
        ("got_ocr2", {"model_type": "qwen2"}),
        ("cohere2_vision", {"model_type": "cohere2"}),
        ("kimi_k25", {"model_type": "deepseek_v3"}),
    ],
)
def test_models_that_only_replace_rows(model_type: str, text: dict[str, Any]) -> None:
    check(model_type, text_config={**SMALL_TEXT, **text})


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        ("no_such_model", {}, "does not know model_type"),
        ("llama", SMALL_TEXT, "that reads images"),
        ("qwen2_vl", {}, "positions with several axes"),
        ("gemma3", {}, "gives its language model attention_mask"),
        ("paligemma", {}, "gives its language model position_ids"),
        ("molmo2", {}, "does more with rows"),
        ("ovis2", {}, "does not take rows"),
        ("mllama", {}, "does not put the rows of an image into its prompt"),
        ("blip-2", {}, "does not put the rows of an image into its prompt"),
        ("llava", {"text_config": {"model_type": "llama"}, "image_token_index": None}, "refuses"),
    ],
)
def test_models_that_do_more(model_type: str, config: dict[str, Any], reason: str) -> None:
    """A guess would be wrong quietly."""
    with pytest.raises(ModelError, match=reason):
        check(model_type, **config)


def write_processor(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a", pad_token="a")
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    LlavaProcessor(
        image_processor=images,
        tokenizer=fast,
        patch_size=4,
        vision_feature_select_strategy="full",
    ).save_pretrained(folder)


CONFIG = {"image_token_id": 1}


def processor(folder: Path, config: dict[str, Any]) -> TransformersProcessor:
    return TransformersProcessor(None, image_setup(folder, config, ["<image>"]))


def make(folder: Path) -> TransformersProcessor:
    write_processor(folder)
    return processor(folder, CONFIG)


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = ["<image>"]


def test_an_image(tmp_path: Path) -> None:
    write_processor(tmp_path)
    processed = processor(tmp_path, CONFIG).process("image", random_image(30, 20), {})
    assert processed.token_ids == [1] * 16
    assert processed.arrays["pixel_values"].shape == (1, 3, 16, 16)
    assert processed.is_row is not None and processed.is_row.all()


def test_options(tmp_path: Path) -> None:
    write_processor(tmp_path)
    ours = processor(tmp_path, CONFIG)
    options = {"crop_size": {"height": 8, "width": 24}}
    processed = ours.process("image", random_image(30, 20), options)
    assert processed.arrays["pixel_values"].shape == (1, 3, 8, 24)
    wrong = {"size": "large"}, {"no_such_option": 1}, {"device": "meta"}
    for each, reason in zip(wrong, ("could not be", "crop_size", "crop_size"), strict=True):
        with pytest.raises(RequestError, match=reason):
            ours.process("image", random_image(30, 20), each)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the processor cannot be loaded"):
        processor(tmp_path, CONFIG)
    write_processor(tmp_path)
    assert processor(tmp_path, {}).token == 1
    with pytest.raises(ModelError, match="image_token_index='x'"):
        processor(tmp_path, {"image_token_index": "x"})
