"""SigLIP: the vectors of texts and images, as transformers makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_clip.siglip import Siglip
from pegboard_model_clip.sizes import SIGLIP_KIND, SIGLIP_PADDING, SIGLIP_TEXT, vision_sizes
from safetensors.torch import load_file
from tiny_media import MEDIA_TEXT, VISION, built_model, open_media_llm, random_model
from tiny_models import VOCAB_SIZE, divide
from tiny_vectors import check_vectors, expected_vector, picture
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, PreTrainedTokenizerFast, SiglipConfig, SiglipTextConfig
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from pegboard import PoolingParams
from pegboard.errors import ModelError, RequestError
from pegboard_testing.fake_build import fake_build

SIDE = VISION["image_size"]
END = VOCAB_SIZE - 1
LENGTH = 16
TEXT = {
    name: value
    for name, value in MEDIA_TEXT.items()
    if name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
}
WORDS = [f"w{number}" for number in range(1, LENGTH)]
TEXTS = ["w1", "w5 w6 w7 w8", " ".join(WORDS), "", "w5 w6 w7"]


def write(
    folder: Path, *, pad: str = "<e>", side: str = "right", vision: Any = None, **text: Any
) -> Any:
    """Write a SigLIP with its processor and tokenizer, and return the model."""
    sizes = {"num_hidden_layers": 3, "max_position_embeddings": LENGTH, "pad_token_id": 7}
    model = random_model(
        AutoModel,
        "siglip",
        text_config={**TEXT, **sizes, "projection_size": VISION["hidden_size"], **text},
        vision_config={**VISION, **(vision or {})},
    )
    model.save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    vocabulary = {f"w{number}": number for number in range(END)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<e>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <e>", special_tokens=[("<e>", END)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w0",
        pad_token=pad,
        eos_token="<e>",
        padding_side=side,
    ).save_pretrained(folder)
    return model


def expected(model: Any, folder: Path, prompt: Any) -> torch.Tensor:
    """Return the normalized vector that transformers makes of a text or an image."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    images = SiglipImageProcessorPil.from_pretrained(folder)

    def token_ids(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, padding="max_length", max_length=LENGTH)["input_ids"]
        return ids

    return expected_vector(model, images, token_ids, prompt)


def check(model: Any, folder: Path, **chosen: Any) -> None:
    check_vectors(lambda one: expected(model, folder, one), folder, TEXTS, **chosen)


SETTINGS: dict[str, dict[str, Any]] = {
    "one text in a step": {"max_num_batched_tokens": LENGTH},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}


@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS.keys())
def test_vectors(tmp_path: Path, chosen: dict[str, Any]) -> None:
    check(write(tmp_path), tmp_path, **chosen)


@pytest.mark.parametrize(
    "more",
    [
        {"hidden_act": "gelu", "layer_norm_eps": 0.1},
        {"pad": "w0"},
        {"side": "left"},
        {"vision": {"hidden_act": "relu", "layer_norm_eps": 0.1}},
    ],
)
def test_other_layers_and_padding(tmp_path: Path, more: dict[str, Any]) -> None:
    check(write(tmp_path, **more), tmp_path)


def test_the_padding_of_the_config(tmp_path: Path) -> None:
    """Where the tokenizer names none."""
    model = write(tmp_path, pad="w7")
    file = tmp_path / "tokenizer_config.json"
    values = json.loads(file.read_text())
    vector = expected(model, tmp_path, "w1 w2")
    file.write_text(json.dumps({**values, "pad_token": None}))
    with open_media_llm(tmp_path, runner="pooling") as llm:
        (output,) = llm.embed(["w1 w2"], use_tqdm=False)
    assert output.prompt_token_ids == [1, 2, END, *[7] * (LENGTH - 3)]
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), vector, atol=1e-4, rtol=0)


def test_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2, 1)
    check(write(tmp_path), tmp_path)


def test_texts_that_are_cut(tmp_path: Path) -> None:
    """They keep their end, and are padded after that."""
    write(tmp_path, pad="w0")
    params = PoolingParams(truncate_prompt_tokens=3)
    with open_media_llm(tmp_path, runner="pooling") as llm:
        (output,) = llm.embed([" ".join(["w3"] * 40)], pooling_params=params, use_tqdm=False)
    assert output.prompt_token_ids == [3, 3, END, *[0] * (LENGTH - 3)]


@given(count=st.integers(1, 5))
@settings(max_examples=5, deadline=None)
def test_rows(tmp_path_factory: pytest.TempPathFactory, count: int) -> None:
    """All tensors are read, but the two with which probabilities are made."""
    folder = tmp_path_factory.mktemp("siglip")
    model = write(folder)
    ours, used = built_model(Siglip, folder)
    left = load_file(folder / "model.safetensors").keys() - used
    assert left == {"logit_scale", "logit_bias"}
    pixels = torch.randn(count, 3, SIDE, SIDE)
    rows = torch.cat([*ours.encode("image", [{"pixel_values": one} for one in pixels])])
    with torch.no_grad():
        theirs = model.get_image_features(pixels).pooler_output
    width = TEXT["hidden_size"]
    torch.testing.assert_close(rows[:, width:-1], theirs, atol=1e-4, rtol=1e-4)


def test_prompts_that_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    both = {**picture(9, 9), "prompt": "w1 w2"}
    long = " ".join(["w3"] * LENGTH)
    with open_media_llm(tmp_path, runner="pooling") as llm:
        for one, message in (
            (both, "1 images and 3 tokens of text; SigLIP makes a vector of one image"),
            (long, f"max_model_len is {LENGTH}"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.embed([one], use_tqdm=False)
    with (
        open_media_llm(tmp_path, runner="pooling", max_model_len=LENGTH - 1) as llm,
        pytest.raises(
            RequestError,
            match="has 16 tokens, with its padding, but max_model_len",
        ),
    ):
        llm.embed(["w1"], use_tqdm=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"text_config": {"hidden_size": 30}}, "hidden_size=30, which is not a multiple"),
        ({"text_config": {"hidden_size": 24}}, "texts have 24 numbers and those of images 768"),
        ({"text_config": {"projection_size": 5}}, "texts have 5 numbers and those of images 768"),
        ({"vision_config": {"vision_use_head": False}}, "vision_use_head=False; expected true"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "supported: siglip_vision_model"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Siglip(config, fake_build())


def test_stages_are_refused() -> None:
    with pytest.raises(ModelError, match="SigLIP cannot be divided among pipeline stages"):
        Siglip({}, fake_build(layers=range(1, 2)))


def test_values_that_a_config_lacks() -> None:
    theirs = SiglipTextConfig()
    assert {name: getattr(theirs, name) for name in SIGLIP_TEXT} == SIGLIP_TEXT
    assert theirs.pad_token_id == SIGLIP_PADDING
    size = SiglipConfig().vision_config.image_size
    assert vision_sizes({}, SIGLIP_KIND).image_size == size
