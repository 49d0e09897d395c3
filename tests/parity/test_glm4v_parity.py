"""GLM-4.1V, GLM-4.5V and GLM-4.6V: the rows of transformers, its logits with images and videos, and
what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_glm4v.glm4v import Glm4v
from pegboard_model_glm4v.sizes import NUMBERS, VALUES
from safetensors.torch import load_file
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    language_model,
    make_media_model,
    make_tokenizer,
    mixed_prompts,
    some_prompts,
)
from tiny_models import divide
from transformers import AutoConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from pegboard.errors import ModelError
from pegboard_media.video import check_video
from pegboard_testing.fake_build import fake_build
from pegboard_testing.video_peers import peer_frames, video_module
from pegboard_weights.hf_files import read_config, with_defaults

SPECIAL = [
    "<|begin_of_image|>",
    "<|image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|video|>",
    "<|end_of_video|>",
]
START, IMAGE, END, FIRST, VIDEO, LAST = range(100, 106)
MARK = " ".join(SPECIAL[:3])
FILM = " ".join(SPECIAL[3:])
LIMITS = {"shortest_edge": 128, "longest_edge": 2048}
VISION = {
    "hidden_size": 24,
    "num_heads": 3,
    "depth": 3,
    "intermediate_size": 40,
    "patch_size": 4,
    "image_size": 20,
    "out_hidden_size": MEDIA_TEXT["hidden_size"],
}
HEAD = MEDIA_TEXT["hidden_size"] // MEDIA_TEXT["num_attention_heads"]
PAIRS = HEAD // 4
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "glm4v": {},
    "glm4v_moe": EXPERTS,
    "glm46v": {},
    "glm46v with experts": EXPERTS,
}
PARTS = {"glm46v": "glm4v", "glm46v with experts": "glm4v_moe"}
"""The model types of the parts of a kind, if they are not its own."""


class Embedded(MediaReference):
    """The model gets embeddings, and the positions that it makes itself: of tokens, it takes no
    prompts with images and videos, and none of its outputs may be the token of images."""

    def logprobs(self, one: Prompt, outputs: Any) -> torch.Tensor:
        given = dict(self.inputs(one))
        prompt = given.pop("input_ids")
        is_film = (prompt == FIRST).cumsum(1) > (prompt == LAST).cumsum(1)
        types = (prompt == IMAGE).int() * (1 + is_film.int())
        ids = torch.cat([prompt, torch.tensor([list(outputs)]).long()], 1)
        later = torch.zeros(1, len(outputs), dtype=types.dtype)
        grids = {name: given.get(name) for name in ("image_grid_thw", "video_grid_thw")}
        inner = self.model.model
        with torch.no_grad():
            rows = inner.get_input_embeddings()(ids)
            if "pixel_values" in given:
                images = inner.get_image_features(given["pixel_values"], grids["image_grid_thw"])
                rows[:, : types.shape[1]][types == 1] = torch.cat([*images.pooler_output])
            if "pixel_values_videos" in given:
                films = inner.get_video_features(
                    given["pixel_values_videos"], grids["video_grid_thw"]
                )
                rows[:, : types.shape[1]][types == 2] = torch.cat([*films.pooler_output])
            places, _ = inner.get_rope_index(ids, torch.cat([types, later], 1), **grids)
            logits = self.model(inputs_embeds=rows, position_ids=places).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def write(folder: Path, kind: str, **more: Any) -> MediaReference:
    text = {
        **MEDIA_TEXT,
        "model_type": f"{PARTS.get(kind, kind)}_text",
        "head_dim": HEAD,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [PAIRS - 2 * (PAIRS // 3), PAIRS // 3, PAIRS // 3],
        },
        **KINDS[kind],
    }
    model = make_media_model(
        kind.split()[0],
        text_config=text,
        vision_config={"model_type": f"{PARTS.get(kind, kind)}_vision", **VISION, **more},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=START,
        image_end_token_id=END,
        video_start_token_id=FIRST,
        video_end_token_id=LAST,
    )
    model.save_pretrained(folder)
    images = Glm4vImageProcessorPil(patch_size=4, size=LIMITS)
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
                return framed(int(next(grids).prod()) // 4)
            video, (_, (count, height, width)) = next(shown)
            seconds = video.seconds[::2]
            assert len(seconds) == count
            rows = framed(height * width // 4)
            texts = [f"{rows} {time_text(kind, time)}" for time in seconds]
            return " ".join([SPECIAL[3], *texts, SPECIAL[5]])

        marks = f"{re.escape(MARK)}|{re.escape(FILM)}"
        text = re.sub(marks, expanded, one["prompt"])
        return {"input_ids": torch.tensor([tokenizer.encode(text)]), **arrays}

    return Embedded(folder, model, inputs)


def time_text(kind: str, seconds: float) -> str:
    return f"{seconds:.1f} seconds" if kind in PARTS else str(int(seconds))


def framed(num_rows: int) -> str:
    """Return the text of an image."""
    return " ".join([SPECIAL[0], *[SPECIAL[1]] * num_rows, SPECIAL[2]])


def patched(images: Any, frames: Any) -> tuple[torch.Tensor, list[int]]:
    """Return the patches of a video and their grid, by the steps of transformers."""
    module = video_module("glm4v")
    count, height, width, _ = frames.shape
    size = module.smart_resize(count, height, width, 2, 8, *LIMITS.values())
    pixels = torch.from_numpy(peer_frames(images, frames, size))
    patches, *grid = module.Glm4vVideoProcessor.patchify(None, pixels[None], 4, 2, 2)
    return patches[0], grid


@pytest.fixture(scope="module", params=KINDS)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(tmp_path_factory.mktemp("glm4v"), request.param)


sides = st.integers(1, 8).map(lambda count: 2 * count)
grids = st.lists(st.tuples(st.integers(1, 4), sides, sides), min_size=1, max_size=4)


@pytest.mark.parametrize("modality", ["image", "video"])
@given(shapes=grids)
@settings(max_examples=10, deadline=None)
def test_rows(reference: MediaReference, modality: str, shapes: list[tuple[int, ...]]) -> None:
    ours, _ = built_model(Glm4v, reference.directory)
    sizes = torch.tensor(shapes)
    if modality == "image":
        sizes[:, 0] = 1
    pixels = [torch.randn(int(grid.prod()), 3 * 2 * 16) for grid in sizes]
    features = getattr(reference.model.model, f"get_{modality}_features")
    with torch.no_grad():
        expected = features(torch.cat(pixels), sizes).pooler_output
    name = "pixel_values" if modality == "image" else "pixel_values_videos"
    items = [
        {name: each, f"{modality}_grid_thw": grid} for each, grid in zip(pixels, sizes, strict=True)
    ]
    for found, rows in zip(ours.encode(modality, items), expected, strict=True):
        torch.testing.assert_close(found, rows, atol=1e-4, rtol=1e-4)


def test_the_tensors_that_are_read(reference: MediaReference) -> None:
    _, used = built_model(Glm4v, reference.directory)
    assert used == load_file(reference.directory / "model.safetensors").keys()
    _, later = built_model(Glm4v, reference.directory, layers=range(1, 2))
    assert not any("visual" in name for name in later)


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(reference: MediaReference, settings: dict[str, Any]) -> None:
    """Twice: the second time, the prefixes are in the cache."""
    prompts = [*some_prompts(MARK), *mixed_prompts(MARK, FILM)]
    check_media(reference, prompts, repeats=2, **settings)


def test_stages(reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2, 2)
    check_media(reference, mixed_prompts(MARK, FILM), num_tokens=3)


def test_recorded(reference: MediaReference, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pegboard")
    check_media(reference, some_prompts(MARK), block_size=16)
    assert "eagerly" not in caplog.text and "not replayed" not in caplog.text


def test_a_tower_with_biases(tmp_path: Path) -> None:
    reference = write(tmp_path, "glm4v", attention_bias=True)
    check_media(reference, some_prompts(MARK), num_tokens=3)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_a_config_lacks(kind: str) -> None:
    theirs = AutoConfig.for_model(kind.split()[0])
    assert {**NUMBERS, **VALUES}.items() <= theirs.vision_config.to_dict().items()
    assert theirs.text_config.rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, "depth=0; expected a whole number from 1 on"),
        ({"num_heads": 5}, "num_heads=5; expected a divisor of a quarter of 24"),
        ({"image_size": 3}, "image_size=3; expected at least patch_size=4"),
        ({"hidden_act": "sine"}, "unknown activation 'sine'"),
        ({"out_hidden_size": 7}, "rows of images have 7 numbers; those of its language model"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write(tmp_path, "glm4v")
    config = with_defaults(read_config(tmp_path))
    build = fake_build(models=language_model)
    with pytest.raises(ModelError, match=message):
        Glm4v({**config, "vision_config": {**config["vision_config"], **change}}, build)
