"""Qwen2-VL and Qwen2.5-VL: the rows, positions and logits of transformers, however the prompts are
computed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_qwen_vl.qwen_vl import Qwen2VL, Qwen25VL
from pegboard_model_qwen_vl.sizes import TOKENS
from safetensors.torch import load_file, save_file
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    Prompt,
    check_media,
    make_media_model,
    make_tokenizer,
    open_media_llm,
    prompt,
)
from tiny_models import divide
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pegboard import SamplingParams
from pegboard.errors import ModelError
from pegboard.plugins.importing import import_object, import_spec
from pegboard_media.video import check_video
from pegboard_models.window_sizes import EARLIER, LATER, LATER_WHOLE
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build, load_layers
from pegboard_testing.video_peers import peer_frames, video_module
from pegboard_weights.hf_files import read_config, with_defaults

SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
MARK = "<|vision_start|> <|image_pad|> <|vision_end|>"
FILM = "<|vision_start|> <|video_pad|> <|vision_end|>"
START, IMAGE, END, VIDEO = range(100, 104)
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 24, "num_heads": 3, "depth": 3, "mlp_ratio": 2, "patch_size": 4},
    "qwen2_5_vl": {
        "hidden_size": 24,
        "num_heads": 3,
        "depth": 3,
        "intermediate_size": 40,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
}
FAMILIES = {"qwen2_vl": Qwen2VL, "qwen2_5_vl": Qwen25VL}
LAYOUTS = ["as one part", "older"]


def renamed(name: str, layout: str) -> str:
    """Return the name of a tensor in this layout. name: in either of them."""
    plain = name.removeprefix("model.").removeprefix("language_model.")
    if plain.startswith("lm_head"):
        return plain
    is_tower = plain.startswith("visual.")
    if layout == "older":
        return plain if is_tower else f"model.{plain}"
    return f"model.{plain}" if is_tower else f"model.language_model.{plain}"


class Typed(MediaReference):
    """The model is told which tokens are images and videos, and the positions of all of them:
    transformers forgets the times of a video in the positions after it."""

    def logprobs(self, one: Prompt, outputs: Any) -> torch.Tensor:
        given = dict(self.inputs(one))
        ids = torch.cat([given["input_ids"], torch.tensor([list(outputs)]).long()], 1)
        types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        intervals = given.pop("intervals")
        given |= {"input_ids": ids, "mm_token_type_ids": types}
        given["position_ids"] = positions(given, intervals)[:, None]
        with torch.no_grad():
            logits = self.model(**given).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def positions(given: Mapping[str, torch.Tensor], intervals: Sequence[float]) -> torch.Tensor:
    """Return the positions [3, T] of all tokens. intervals: between the times of each video."""
    kinds = given["mm_token_type_ids"][0].tolist()
    grids = {1: iter(given.get("image_grid_thw", [])), 2: iter(given.get("video_grid_thw", []))}
    steps = iter(intervals)
    parts = []
    start = place = 0
    while place < len(kinds):
        count = 1
        part = torch.full((3, 1), start)
        if kind := kinds[place]:
            frames, height, width = next(grids[kind]).tolist()
            part = torch.cartesian_prod(*map(torch.arange, (frames, height // 2, width // 2)))
            part = part.view(-1, 3).T.clone()
            part[0] = (part[0] * (next(steps) if kind == 2 else 1)).long()
            count = part.shape[1]
            part += start
        parts.append(part)
        place += count
        start = int(part.max()) + 1
    return torch.cat(parts, 1)


def write(folder: Path, kind: str, layout: str, **more: Any) -> MediaReference:
    reference, images, tokenizer = made(kind, VISION[kind], **more)
    reference.model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {renamed(name, layout): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return replace(reference, directory=folder)


def made(kind: str, vision: Mapping[str, Any], **more: Any) -> tuple[Typed, Any, Any]:
    """Return a model that is not on disk, its image processor and its tokenizer."""
    text = {
        "model_type": f"{kind}_text",
        **MEDIA_TEXT,
        "rope_parameters": {"rope_type": "default", "mrope_section": sections()},
    }
    outer = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    model = make_media_model(
        kind,
        text_config=text,
        vision_config={**vision, outer: text["hidden_size"]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        **more,
    )
    rate = model.config.vision_config.to_dict().get("tokens_per_second", 4)
    images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=8 * 8, max_pixels=32 * 32)
    tokenizer = make_tokenizer(SPECIAL, MARK, FILM)

    def inputs(one: Prompt) -> Mapping[str, Any]:
        ids: list[int] = []
        media = one.get("multi_modal_data", {})
        given = media.get("image", [])
        arrays = dict(images(given, return_tensors="pt")) if given else {}
        videos = [check_video(video) for video in media.get("video", [])]
        films = [patched(images, video.frames) for video in videos]
        if films:
            arrays["pixel_values_videos"] = torch.cat([patches for patches, _ in films])
            arrays["video_grid_thw"] = torch.tensor([grid for _, grid in films])
        counts = {
            IMAGE: iter(arrays.get("image_grid_thw", [])),
            VIDEO: iter(arrays.get("video_grid_thw", [])),
        }
        for token in tokenizer.encode(one["prompt"]):
            ids += [token] * (int(next(counts[token]).prod()) // 4 if token in counts else 1)
        intervals = [1.0 if kind == "qwen2_vl" else rate * 2 / video.fps for video in videos]
        return {"input_ids": torch.tensor([ids]), "intervals": intervals, **arrays}

    return Typed(Path(), model, inputs), images, tokenizer


def patched(images: Any, frames: Any) -> tuple[torch.Tensor, list[int]]:
    """Return the patches of a video and their grid, by the steps of transformers."""
    module = video_module("qwen2_vl")
    size = module.smart_resize(*frames.shape[1:3], factor=8, min_pixels=64, max_pixels=1024)
    pixels = torch.from_numpy(peer_frames(images, frames, size))
    patches, *grid = module.Qwen2VLVideoProcessor.patchify(None, pixels[None], 4, 2, 2)
    return patches[0], grid


def sections() -> list[int]:
    """Return numbers of pairs of channels of three axes."""
    pairs = MEDIA_TEXT["hidden_size"] // MEDIA_TEXT["num_attention_heads"] // 2
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


@pytest.fixture(scope="module", params=[(kind, each) for kind in VISION for each in LAYOUTS])
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, MediaReference]:
    """Return a kind of model, and one of it in one of the layouts."""
    kind, layout = request.param
    return kind, write(tmp_path_factory.mktemp("qwen_vl"), kind, layout)


@pytest.fixture(scope="module", params=VISION)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(tmp_path_factory.mktemp("qwen_vl"), request.param, LAYOUTS[1])


def language_model(config: Any, build: Any) -> Any:
    entry = installed_entry("model", config["architectures"][0])
    return import_object(import_spec(entry).implementation)(config, build)


def test_rows(both: tuple[str, MediaReference]) -> None:
    kind, reference = both
    tensors = load_file(reference.directory / "model.safetensors")
    build = fake_build(stored=tensors.keys(), models=language_model)
    model: Any = FAMILIES[kind](with_defaults(read_config(reference.directory)), build)
    load_layers(build.declared.layers, tensors, bind=False)
    for layer in build.declared.layers:
        if "visual" in layer.build.path:
            layer.bind()
    grids = torch.tensor([[1, 6, 4], [1, 2, 2], [1, 10, 14], [1, 8, 8], [1, 2, 12]])
    pixels = [torch.randn(int(grid.prod()), 3 * 2 * 16) for grid in grids]
    with torch.no_grad():
        expected = reference.model.model.get_image_features(torch.cat(pixels), grids).pooler_output
    items = [
        {"pixel_values": each, "image_grid_thw": grid}
        for each, grid in zip(pixels, grids, strict=True)
    ]
    found = model.encode("image", items)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    grids[:, 0] = torch.tensor([3, 1, 2, 5, 2])
    pixels = [torch.randn(int(grid.prod()), 3 * 2 * 16) for grid in grids]
    with torch.no_grad():
        expected = reference.model.model.get_video_features(torch.cat(pixels), grids).pooler_output
    items = [
        {"pixel_values_videos": each, "video_grid_thw": grid}
        for each, grid in zip(pixels, grids, strict=True)
    ]
    for ours, theirs in zip(model.encode("video", items), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def prompts() -> list[Prompt]:
    """Return prompts with no, one and two images of different sizes, in either order."""
    wide = random_image(40, 20, seed=1)
    tall = random_image(13, 50, seed=2)
    return [
        prompt(5, wide, 6, 7, mark=MARK),
        prompt(*range(8, 30), mark=MARK),
        prompt(tall, 9, wide, 10, mark=MARK),
        prompt(11, wide, tall, 12, 13, 14, mark=MARK),
        prompt(wide, mark=MARK),
    ]


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(reference: MediaReference, settings: dict[str, Any]) -> None:
    """Twice: the second time, the prefixes are in the cache."""
    check_media(reference, prompts(), repeats=2, **settings)


def test_both_layouts(both: tuple[str, MediaReference]) -> None:
    check_media(both[1], prompts(), num_tokens=3)


def test_preempted(reference: MediaReference) -> None:
    """There is room for one of the prompts and a half."""
    many = [prompt(number, random_image(20, 20, number), 5, mark=MARK) for number in range(4)]
    check_media(reference, many, num_tokens=12, num_gpu_blocks_override=12, max_model_len=40)


def test_stages(reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 1, 2)
    check_media(reference, prompts())


def test_recorded(reference: MediaReference, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pegboard")
    check_media(reference, prompts(), block_size=16)
    assert "eagerly" not in caplog.text and "not replayed" not in caplog.text


def test_a_flat_config(tmp_path: Path) -> None:
    """Older checkpoints have no text_config."""
    reference = write(tmp_path, "qwen2_vl", "older")
    config = read_config(tmp_path)
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config |= {**text, "model_type": "qwen2_vl", "architectures": config["architectures"]}
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_media(reference, prompts(), num_tokens=3)


def test_tied_embeddings(tmp_path: Path) -> None:
    reference = write(tmp_path, "qwen2_5_vl", "older", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    check_media(reference, prompts(), num_tokens=3)


def test_two_ranks(reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2)
    check_media(reference, prompts(), num_tokens=3)


def test_values_that_a_vision_config_lacks() -> None:
    for name, expected in (("qwen2_vl", EARLIER), ("qwen2_5_vl", LATER)):
        theirs = AutoConfig.for_model(name).vision_config.to_dict()
        assert expected.items() <= theirs.items()
        assert AutoConfig.for_model(name).image_token_id == TOKENS[0]
    assert tuple(theirs["fullatt_block_indexes"]) == LATER_WHOLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, "depth=0; expected a whole number from 1 on"),
        ({"patch_size": [4, 4]}, r"patch_size=\[4, 4\]; expected a whole number"),
        ({"num_heads": 5}, "num_heads=5; expected a divisor of a quarter of 24"),
        ({"out_hidden_size": 7}, "rows of images have 7 numbers; those of its language model"),
        ({"window_size": 7}, "window_size=7; expected at least 8"),
        ({"fullatt_block_indexes": 3}, "fullatt_block_indexes=3; expected a list of layers"),
        ({"hidden_act": "sine"}, "unknown activation 'sine'"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write(tmp_path, "qwen2_5_vl", "older")
    config = with_defaults(read_config(tmp_path))
    build = fake_build(models=language_model)
    with pytest.raises(ModelError, match=message):
        Qwen25VL({**config, "vision_config": {**config["vision_config"], **change}}, build)


def test_a_config_without_axes(tmp_path: Path) -> None:
    write(tmp_path, "qwen2_vl", "older")
    config = with_defaults(read_config(tmp_path))
    text = {**config["text_config"], "rope_parameters": {"rope_theta": 10000.0}}
    with pytest.raises(ModelError, match="have no mrope_section; expected"):
        Qwen2VL({**config, "text_config": text}, fake_build(models=language_model))


def test_fewer_pixels(reference: MediaReference) -> None:
    """The options of a request change the tokens of its images."""
    params = SamplingParams(max_tokens=1, temperature=0)
    one = prompt(5, random_image(64, 64), mark=MARK)
    small = {**one, "mm_processor_kwargs": {"max_pixels": 16 * 16}}
    with open_media_llm(reference.directory) as llm:
        whole, less = llm.generate([one, small], params, use_tqdm=False)
    assert whole.prompt_token_ids.count(IMAGE) == 16
    assert less.prompt_token_ids.count(IMAGE) == 4
