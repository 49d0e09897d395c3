"""The processors of videos, compared with those of transformers, on frames of many sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_llava.defaults import (
    IMAGE_TOKEN,
    ONEVISION_IMAGE_TOKEN,
    ONEVISION_VIDEO_TOKEN,
    VIDEO_IMAGE_TOKEN,
    VIDEO_TOKEN,
)
from pegboard_model_llava.processor import (
    LlavaNextVideoProcessor,
    LlavaOnevisionProcessor,
    WithVideos,
)
from PIL import Image
from transformers import AutoConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next_video.processing_llava_next_video import (
    LlavaNextVideoProcessor as TheirNextVideo,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import (
    LlavaOnevisionProcessor as TheirOnevision,
)

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    MultiModalProcessorContract,
    random_image,
)
from pegboard_testing.media_peers import image_setup
from pegboard_testing.video_peers import as_video, random_video, video_module

IMAGE, VIDEO = 2, 3
SIDE = 40
SIZE = {"height": SIDE, "width": SIDE}
GRIDS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]]
VISION = {"image_size": SIDE, "patch_size": 8}
Case = tuple[type[WithVideos], Mapping[str, Any], Any, Mapping[str, Any]]
CASES: dict[str, Case] = {
    "next": (
        LlavaNextVideoProcessor,
        {"vision_config": {"model_type": "clip_vision_model", **VISION}},
        LlavaNextImageProcessorPil(
            size={"shortest_edge": SIDE}, crop_size=SIZE, image_grid_pinpoints=GRIDS
        ),
        {"size": {"shortest_edge": SIDE}, "crop_size": SIZE, "do_center_crop": True},
    ),
    "onevision": (
        LlavaOnevisionProcessor,
        {"vision_config": {"model_type": "siglip_vision_model", **VISION}},
        LlavaOnevisionImageProcessorPil(size=SIZE, image_grid_pinpoints=GRIDS),
        {"size": SIZE, "do_center_crop": False},
    ),
}


def make(folder: Path, name: str, **more: Any) -> Any:
    kind, config, images, videos = CASES[name]
    images.save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    tokens = {"image_token_index": IMAGE, "video_token_index": VIDEO}
    values = {**config, "image_grid_pinpoints": GRIDS, **tokens, **more}
    return kind(None, image_setup(folder, values, ["<image>", "<video>"]))


@pytest.fixture(scope="module", params=CASES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return request.param, make(tmp_path_factory.mktemp("llava"), request.param)


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "LlavaNextVideoForConditionalGeneration"))


class TestNextVideo(MultiModalProcessorContract):
    name = "next"

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def tokenizer(self) -> Any:
        kind, config, *_ = CASES[self.name]
        return image_setup(self.path, config, ["<image>", "<video>"]).tokenizer

    def processor(self) -> Any:
        return make(self.path, self.name)

    def items(self) -> list[tuple[str, Any]]:
        sizes = ((3, 20, 30), (1, 7, 50), (4, 9, 9))
        videos = [("video", as_video(random_video(*size))) for size in sizes]
        return [("image", random_image(20, 30)), *videos]


class TestOnevision(TestNextVideo):
    name = "onevision"


videos = st.builds(
    random_video,
    st.integers(1, 4),
    st.integers(1, 120),
    st.integers(1, 120),
    st.just(2.0),
    st.integers(0, 99),
)


@given(videos)
@settings(max_examples=60, deadline=None)
def test_arrays(pair: tuple[str, Any], video: Any) -> None:
    """The pixels that transformers' image processor makes of each frame, and the tokens of its
    processor of videos."""
    name, ours = pair
    theirs = CLIPImageProcessorPil(**CASES[name][3])
    frames = [Image.fromarray(frame) for frame in video[0]]
    expected = theirs(frames, return_tensors="np")["pixel_values"]
    found = ours.process("video", as_video(video), {})
    pixels = found.arrays["pixel_values_videos"]
    np.testing.assert_allclose(pixels, expected, atol=1e-5)
    assert pixels.dtype == np.float32
    given = {"pixel_values_videos": expected[None]}
    if name == "next":
        peer: Any = SimpleNamespace(patch_size=10, video_token="v")
        count = len(TheirNextVideo.replace_video_token(peer, given, 0))  # of 4 patches a side
        assert count == 4 * len(video[0]) == len(found.token_ids)
    else:
        peer = SimpleNamespace(num_image_tokens=25, video_token="v")
        assert len(found.token_ids) == len(TheirOnevision.replace_video_token(peer, given, 0))
    assert {*found.token_ids} == {VIDEO}


def test_options(pair: tuple[str, Any]) -> None:
    _, ours = pair
    video = as_video(random_video(2, 60, 50))
    plain = ours.process("video", video, {}).arrays["pixel_values_videos"]
    other = ours.process("video", video, {"do_normalize": False}).arrays["pixel_values_videos"]
    assert other.min() >= 0 and other.max() <= 1 < plain.max()
    for options, message in (
        ({"sharpen": 1}, "has sharpen; the image processor"),
        ({"size": {"height": 8, "width": 8}, "do_center_crop": False}, r"takes \[3, 40, 40\]"),
        ({"image_mean": "a"}, "video could not be processed with"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            ours.process("video", video, options)
        assert caught.value.parameter == "mm_processor_kwargs"


def test_the_placeholders(pair: tuple[str, Any]) -> None:
    _, ours = pair
    assert (ours.placeholder("image").text, ours.placeholder("video").text) == (
        "<image>",
        "<video>",
    )
    assert ours.placeholder("video").token_ids == (VIDEO,)


def test_values_that_are_not_said() -> None:
    for config, image, video in (
        ("llava_next_video", VIDEO_IMAGE_TOKEN, VIDEO_TOKEN),
        ("llava_onevision", ONEVISION_IMAGE_TOKEN, ONEVISION_VIDEO_TOKEN),
    ):
        theirs = AutoConfig.for_model(config)
        assert (theirs.image_token_id, theirs.video_token_id) == (image, video)
    assert AutoConfig.for_model("llava_next").image_token_id == IMAGE_TOKEN
    for family, kind, name in (
        ("llava_next_video", LlavaNextVideoProcessor, "LlavaNextVideoVideoProcessor"),
        ("llava_onevision", LlavaOnevisionProcessor, "LlavaOnevisionVideoProcessor"),
    ):
        peer = getattr(video_module(family), name)
        for field, value in kind.videos.items():
            assert value == getattr(peer, field) or (field, value) == ("do_center_crop", False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spatial_pool_mode": "conv"}, "='conv'; only 'average' is supported"),
        ({"spatial_pool_stride": 0}, "=0; expected a whole number from 1 on"),
    ],
)
def test_pooling_that_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, "next", **change)


@pytest.mark.parametrize("content", ["[", "[1]"])
def test_files_that_are_wrong(tmp_path: Path, content: str) -> None:
    make(tmp_path, "next")
    (tmp_path / "video_preprocessor_config.json").write_text(content)
    kind, config, *_ = CASES["next"]
    values = {**config, "image_grid_pinpoints": GRIDS}
    with pytest.raises(ModelError, match="is not JSON|expected an object"):
        kind(None, image_setup(tmp_path, values, ["<image>", "<video>"]))
