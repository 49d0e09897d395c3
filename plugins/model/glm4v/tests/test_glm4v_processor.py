"""The processor of GLM-4V, compared with those of transformers, on images and videos of many
sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_glm4v.processor import Glm4vProcessor
from transformers import AutoConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor as TheirProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import Processed
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    MultiModalProcessorContract,
    random_image,
)
from pegboard_testing.media_peers import image_setup, random_images
from pegboard_testing.video_peers import as_video, peer_frames, random_video, video_module

PATCH = 4
SIZE = {"shortest_edge": 600, "longest_edge": 9000}
IMAGES = ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"]
VIDEOS = ["<|begin_of_video|>", "<|video|>", "<|end_of_video|>"]
TIMES = [str(number) for number in range(70)]
SPECIAL = [*IMAGES, *VIDEOS, *TIMES]
START, IMAGE, END, _, VIDEO, _ = range(2, 8)
CONFIG = {
    "vision_config": {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
@pytest.mark.parametrize("name", ["Glm4v", "Glm4vMoe", "Glm46V"])
def test_contract(kind: str, name: str) -> None:
    check_entry(installed_entry(kind, f"{name}ForConditionalGeneration"))


def their_images(**more: Any) -> Any:
    return Glm4vImageProcessorPil(**{"patch_size": PATCH, "size": SIZE, **more})


def make(folder: Path) -> Glm4vProcessor:
    their_images().save_pretrained(folder)
    return Glm4vProcessor(None, image_setup(folder, CONFIG, SPECIAL))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Glm4vProcessor:
    return make(tmp_path_factory.mktemp("glm4v"))


class TestContract(MultiModalProcessorContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def tokenizer(self) -> Any:
        return self.processor().tokenizer

    def processor(self) -> Glm4vProcessor:
        return make(self.path)

    def items(self) -> list[tuple[str, Any]]:
        images = [("image", random_image(*size)) for size in ((20, 30), (7, 50), (9, 9))]
        sizes = ((3, 20, 30), (1, 7, 50), (4, 9, 9))
        return [*images, *(("video", as_video(random_video(*size))) for size in sizes)]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return int(arrays[f"{modality}_grid_thw"].prod()) // 4

    def form_of(self, modality: str, processed: Processed) -> Mapping[str, Any] | None:
        grid = processed.arrays.get("image_grid_thw")
        return None if grid is None else {"image_grid_thw": grid}


def sizes() -> Any:
    """Return a strategy of options with a size, or without."""
    edges = st.tuples(st.integers(1, 3000), st.integers(3000, 20000))
    size = edges.map(
        lambda pair: {"size": dict(zip(("shortest_edge", "longest_edge"), pair, strict=True))}
    )
    return st.just({}) | size


@given(random_images(), sizes())
@settings(max_examples=50, deadline=None)
def test_images(ours: Glm4vProcessor, image: Any, options: dict[str, Any]) -> None:
    """The arrays of transformers' image processor, and the text of its processor."""
    expected = their_images(**options)([image], return_tensors="np")
    found = ours.process("image", image, options)
    np.testing.assert_array_equal(found.arrays["pixel_values"], expected["pixel_values"])
    assert found.arrays["image_grid_thw"].tolist() == expected["image_grid_thw"][0].tolist()
    theirs: Any = SimpleNamespace(
        image_processor=SimpleNamespace(merge_size=2), image_token=IMAGES[1]
    )
    text = TheirProcessor.replace_image_token(theirs, expected, 0)
    assert list(found.token_ids) == ours.tokenizer.encode(text, add_special_tokens=False)
    assert found.is_row is None


videos = st.builds(
    random_video,
    st.integers(1, 9),
    st.integers(2, 90),
    st.integers(2, 90),
    st.floats(0.15, 60),
    st.integers(0, 99),
)


@given(videos, sizes())
@settings(max_examples=50, deadline=None)
def test_videos(ours: Glm4vProcessor, video: Any, options: dict[str, Any]) -> None:
    """The size, the patches and the tokens of transformers' processors, and the pixels that its
    image processor makes of each frame. transformers refuses a single frame."""
    module = video_module("glm4v")
    frames, fps = video
    count, height, width, _ = frames.shape
    limits = options.get("size", SIZE).values()
    size = module.smart_resize(max(count, 2), height, width, 2, 2 * PATCH, *limits)
    pixels = torch.from_numpy(peer_frames(their_images(), frames, size))
    patchify = module.Glm4vVideoProcessor.patchify
    expected, *grid = patchify(None, pixels[None], PATCH, 2, 2)
    found = ours.process("video", as_video(video), options)
    np.testing.assert_allclose(found.arrays["pixel_values_videos"], expected[0], atol=1e-5)
    assert found.arrays["video_grid_thw"].tolist() == grid
    text = their_text(TheirProcessor, grid, [index / fps for index in range(count)])
    assert list(found.token_ids) == ours.tokenizer.encode(text, add_special_tokens=False)
    assert found.is_row is not None
    assert found.is_row.tolist() == [token == IMAGE for token in found.token_ids]


def their_text(kind: Any, grid: list[int], seconds: list[float]) -> str:
    """Return what a processor of transformers writes for a video."""
    theirs: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2), image_token=IMAGES[1]
    )
    theirs.replace_frame_token_id = kind.replace_frame_token_id.__get__(theirs)
    metadata = SimpleNamespace(fps=1.0, timestamps=seconds)
    given = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    text: str = kind.replace_video_token(theirs, given, 0)
    return text


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (TheirProcessor, ["0", "2", "9"]),
        (Glm46VProcessor, ["0.0 seconds", "2.1 seconds", "9.9 seconds"]),
    ],
)
def test_the_text_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, texts: list[str]
) -> None:
    """Whole seconds, or tenths of them if the checkpoint's processor is that of GLM-4.6V."""
    make(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": kind.__name__}))
    ours = Glm4vProcessor(None, image_setup(tmp_path, CONFIG, SPECIAL))
    heard: list[str] = []

    def kept(text: str, *, add_special_tokens: bool) -> list[int]:
        heard.append(text)
        return []

    monkeypatch.setattr(ours.tokenizer, "encode", kept)
    frames, _ = random_video(5, 20, 20)
    seconds = (0.0, 0.5, 2.14, 4.2, 9.9)
    found = ours.process("video", as_video((frames, 1.0))._replace(seconds=seconds), {})
    assert heard == texts
    text = their_text(kind, found.arrays["video_grid_thw"].tolist(), [*seconds])
    assert "".join(text.replace(IMAGES[1], "").split(IMAGES[0])).split(IMAGES[2])[1:] == texts


def test_times_without_a_named_processor(tmp_path: Path) -> None:
    make(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    values = json.loads(file.read_text())
    values.pop("processor_class", None)
    file.write_text(json.dumps(values))
    later = {**CONFIG, "model_type": "glm46v"}
    assert Glm4vProcessor(None, image_setup(tmp_path, later, SPECIAL)).has_tenths
    assert not Glm4vProcessor(None, image_setup(tmp_path, CONFIG, SPECIAL)).has_tenths
    file.write_text(json.dumps({**values, "processor_class": "Glm4vProcessor"}))
    assert not Glm4vProcessor(None, image_setup(tmp_path, later, SPECIAL)).has_tenths


def test_how_videos_are_processed(tmp_path: Path, ours: Glm4vProcessor) -> None:
    """The file for images counts if there is none for videos, and then the values of
    transformers."""
    assert ours.videos["size"] == SIZE
    make(tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text("{}")
    found = Glm4vProcessor(None, image_setup(tmp_path, CONFIG, SPECIAL)).videos
    theirs = video_module("glm4v").Glm4vVideoProcessor
    for name, value in found.items():
        expected = getattr(theirs, name)
        assert value == (tuple(expected) if isinstance(expected, list) else expected)


def test_the_placeholder(ours: Glm4vProcessor) -> None:
    for modality, texts, token in (("image", IMAGES, IMAGE), ("video", VIDEOS, VIDEO)):
        found = ours.placeholder(modality)
        assert found.text == "".join(texts)
        assert found.token_ids == (token,)


def test_tokens_that_a_config_lacks() -> None:
    assert Glm4vProcessor.tokens == (
        AutoConfig.for_model("glm4v").image_token_id,
        AutoConfig.for_model("glm4v").video_token_id,
    )


@pytest.mark.parametrize("modality", ["image", "video"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharpen": 2}, "sharpen; the image processor Glm4vImageProcessorPil takes"),
        ({"patch_size": 5}, "has patch_size"),
        ({"size": {"height": 3}}, "could not be processed"),
        ({"do_resize": False}, "could not be processed"),
    ],
)
def test_options_that_are_refused(
    ours: Glm4vProcessor, modality: str, options: Mapping[str, Any], message: str
) -> None:
    value = random_image(50, 51) if modality == "image" else as_video(random_video(2, 50, 51))
    with pytest.raises(RequestError, match=message) as caught:
        ours.process(modality, value, options)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_thin_items(ours: Glm4vProcessor) -> None:
    with pytest.raises(RequestError, match="200 times"):
        ours.process("image", random_image(2000, 8), {})
    with pytest.raises(RequestError, match="200 times"):
        ours.process("video", as_video(random_video(2, 2000, 8)), {})


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_glm4v.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
