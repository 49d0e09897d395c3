"""Qwen3-VL: the rows of transformers, its logits with images, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_qwen_vl.qwen_vl import Qwen3VL
from safetensors.torch import load_file, save_file
from test_qwen_vl_parity import (
    END,
    FILM,
    IMAGE,
    MARK,
    SPECIAL,
    START,
    VIDEO,
    prompts,
    sections,
)
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    language_model,
    make_media_model,
    make_tokenizer,
)
from tiny_models import divide
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pegboard.errors import ModelError
from pegboard.layers.shards import Stage
from pegboard_media.video import check_video
from pegboard_models.deep_sizes import DEEP, DEEP_TAPS
from pegboard_testing.fake_build import fake_build
from pegboard_testing.video_peers import peer_frames, video_module
from pegboard_weights.hf_files import read_config, with_defaults

LIMITS = {"shortest_edge": 64, "longest_edge": 1024}
VISION = {
    "hidden_size": 24,
    "num_heads": 3,
    "depth": 3,
    "intermediate_size": 40,
    "patch_size": 4,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [2, 0],
    "out_hidden_size": MEDIA_TEXT["hidden_size"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
KINDS = {"qwen3_vl": {}, "qwen3_vl_moe": EXPERTS}


class Typed(MediaReference):
    """The model is told which tokens are images and videos."""

    def logprobs(self, one: Prompt, outputs: Any) -> torch.Tensor:
        given = dict(self.inputs(one))
        ids = torch.cat([given["input_ids"], torch.tensor([list(outputs)]).long()], 1)
        types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        with torch.no_grad():
            logits = self.model(**{**given, "input_ids": ids, "mm_token_type_ids": types}).logits
        return logits[0, -len(outputs) - 1 :].float().log_softmax(-1)


def write(folder: Path, kind: str, **more: Any) -> MediaReference:
    heads = MEDIA_TEXT["num_attention_heads"]
    text = {
        **MEDIA_TEXT,
        "model_type": f"{kind}_text",
        "num_hidden_layers": 4,
        "head_dim": MEDIA_TEXT["hidden_size"] // heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": sections(),
            "mrope_interleaved": True,
        },
        **KINDS[kind],
    }
    model = make_media_model(
        kind,
        text_config=text,
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        **more,
    )
    model.save_pretrained(folder)
    colors = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = Qwen2VLImageProcessorPil(patch_size=4, size=LIMITS, **colors)
    images.save_pretrained(folder)
    tokenizer = make_tokenizer(SPECIAL, MARK, FILM)
    tokenizer.save_pretrained(folder)

    def inputs(one: Prompt) -> Mapping[str, Any]:
        media = one.get("multi_modal_data", {})
        given = media.get("image", [])
        arrays = dict(images(given, return_tensors="pt")) if given else {}
        videos = [check_video(video) for video in media.get("video", [])]
        films = [patched(images, video.frames) for video in videos]
        if films:
            arrays["pixel_values_videos"] = torch.cat([patches for patches, _ in films])
            arrays["video_grid_thw"] = torch.tensor([grid for _, grid in films])
        grids = iter(arrays.get("image_grid_thw", []))
        shown = iter(zip(videos, films, strict=True))

        def expanded(mark: re.Match[str]) -> str:
            if mark[0] == MARK:
                rows = ["<|image_pad|>"] * (int(next(grids).prod()) // 4)
                return " ".join(["<|vision_start|>", *rows, "<|vision_end|>"])
            video, (_, grid) = next(shown)
            return " ".join(frames_of(video, grid))

        marks = f"{re.escape(MARK)}|{re.escape(FILM)}"
        text = re.sub(marks, expanded, one["prompt"])
        return {"input_ids": torch.tensor([tokenizer.encode(text)]), **arrays}

    return Typed(folder, model, inputs)


def frames_of(video: Any, grid: list[int]) -> list[str]:
    """Return the texts of a video: each of its frames behind its time."""
    seconds = [*video.seconds]
    seconds += seconds[-1:] * (len(seconds) % 2)
    rows = ["<|video_pad|>"] * (grid[1] * grid[2] // 4)
    texts = []
    for first, last in zip(seconds[::2], seconds[1::2], strict=True):
        texts += [f"<{(first + last) / 2:.1f} seconds>", "<|vision_start|>", *rows]
        texts.append("<|vision_end|>")
    return texts


def patched(images: Any, frames: Any) -> tuple[torch.Tensor, list[int]]:
    """Return the patches of a video and their grid, by the steps of transformers."""
    module = video_module("qwen3_vl")
    count, height, width, _ = frames.shape
    size = module.smart_resize(count, height, width, 2, 8, *LIMITS.values())
    pixels = torch.from_numpy(peer_frames(images, frames, size))
    patches, *grid = module.Qwen3VLVideoProcessor.patchify(None, pixels[None], 4, 2, 2)
    return patches[0], grid


@pytest.fixture(scope="module", params=KINDS)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(tmp_path_factory.mktemp("qwen3_vl"), request.param)


@pytest.mark.parametrize("modality", ["image", "video"])
def test_rows(reference: MediaReference, modality: str) -> None:
    """The rows of all levels lie beside each other."""
    ours, _ = built_model(Qwen3VL, reference.directory)
    grids = torch.tensor([[1, 6, 4], [1, 2, 2], [1, 10, 14], [1, 8, 8], [1, 2, 12]])
    if modality == "video":
        grids[:, 0] = torch.tensor([3, 1, 2, 5, 2])
    pixels = [torch.randn(int(grid.prod()), 3 * 2 * 16) for grid in grids]
    features = getattr(reference.model.model, f"get_{modality}_features")
    with torch.no_grad():
        expected = features(torch.cat(pixels), grids)
    name = "pixel_values" if modality == "image" else "pixel_values_videos"
    items = [
        {name: each, f"{modality}_grid_thw": grid} for each, grid in zip(pixels, grids, strict=True)
    ]
    levels = [expected.pooler_output, *expected.deepstack_features]
    for found, *parts in zip(ours.encode(modality, items), *levels, strict=True):
        torch.testing.assert_close(found, torch.cat(parts, 1), atol=1e-5, rtol=1e-5)


def test_images(reference: MediaReference) -> None:
    check_media(reference, prompts(), repeats=2)


def test_recorded(reference: MediaReference, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pegboard")
    check_media(reference, prompts(), block_size=16)
    assert "eagerly" not in caplog.text and "not replayed" not in caplog.text


def test_preempted(reference: MediaReference) -> None:
    many = [prompts()[0], prompts()[2], prompts()[3]]
    check_media(reference, many, num_tokens=12, num_gpu_blocks_override=17, max_model_len=60)


def test_stages(reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage has both layers to which the tower adds."""
    divide(monkeypatch, 2, 2)
    check_media(reference, prompts(), num_tokens=3)


def test_a_stage_without_the_layers(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_vl")
    config = with_defaults(read_config(tmp_path))
    build = fake_build(models=language_model, stage=Stage(0, 4))
    with pytest.raises(ModelError, match="first 2 layers, and the first pipeline stage has only 1"):
        Qwen3VL(config, build)


def test_experts_in_the_other_layout(tmp_path: Path) -> None:
    """Published checkpoints have the matrices of experts as [E, in, out]."""
    reference = write(tmp_path, "qwen3_vl_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    check_media(reference, prompts(), num_tokens=3)


def test_tied_embeddings(tmp_path: Path) -> None:
    check_media(write(tmp_path, "qwen3_vl", tie_word_embeddings=True), prompts(), num_tokens=3)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_a_config_lacks(kind: str) -> None:
    theirs = AutoConfig.for_model(kind)
    vision = theirs.vision_config.to_dict()
    assert DEEP.items() <= vision.items()
    assert tuple(vision["deepstack_visual_indexes"]) == DEEP_TAPS
    assert vision["hidden_act"] == "gelu_pytorch_tanh"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, "depth=0; expected a whole number from 1 on"),
        ({"num_heads": 5}, "num_heads=5; expected a divisor of a quarter of 24"),
        ({"num_position_embeddings": 24}, "=24; expected the square of a whole number"),
        ({"deepstack_visual_indexes": [3]}, r"=\[3\]; expected different layers from 0 to 2"),
        ({"deepstack_visual_indexes": [1, 1]}, "expected different layers from 0 to 2"),
        ({"deepstack_visual_indexes": 1}, "=1; expected different layers"),
        ({"out_hidden_size": 7}, "rows of images have 7 numbers; those of its language model"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write(tmp_path, "qwen3_vl")
    config = with_defaults(read_config(tmp_path))
    build = fake_build(models=language_model)
    with pytest.raises(ModelError, match=message):
        Qwen3VL({**config, "vision_config": {**config["vision_config"], **change}}, build)
