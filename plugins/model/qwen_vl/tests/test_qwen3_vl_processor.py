"""The processor of Qwen3-VL, compared with that of transformers, on images and videos of many
sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_qwen_vl.deep_processor import Qwen3VLProcessor
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as TheirProcessor

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import PlacedItem, Processed, Video
from pegboard_models.patch_sizes import AXES
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    MultiModalProcessorContract,
    random_image,
)
from pegboard_testing.media_peers import image_setup
from pegboard_testing.video_peers import as_video, peer_frames, random_video, video_module

PATCH = 4
SIZE = {"shortest_edge": 600, "longest_edge": 9000}
COLORS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
START, IMAGE, END, VIDEO = range(2, 6)
CONFIG = {
    "vision_config": {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
@pytest.mark.parametrize("name", ["Qwen3VL", "Qwen3VLMoe"])
def test_contract(kind: str, name: str) -> None:
    check_entry(installed_entry(kind, f"{name}ForConditionalGeneration"))


def their_images() -> Any:
    return Qwen2VLImageProcessorPil(patch_size=PATCH, size=SIZE, **COLORS)


def make(folder: Path) -> Qwen3VLProcessor:
    their_images().save_pretrained(folder)
    return Qwen3VLProcessor(None, image_setup(folder, CONFIG, SPECIAL))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Qwen3VLProcessor:
    return make(tmp_path_factory.mktemp("qwen3_vl"))


class TestContract(MultiModalProcessorContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def tokenizer(self) -> Any:
        return self.processor().tokenizer

    def processor(self) -> Qwen3VLProcessor:
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


videos = st.builds(
    random_video,
    st.integers(1, 9),
    st.integers(2, 90),
    st.integers(2, 90),
    st.floats(0.1, 60),
    st.integers(0, 99),
)
limits = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {}, optional={"min_pixels": st.integers(1, 3000), "max_pixels": st.integers(600, 20000)}
    ).filter(lambda one: one.get("min_pixels", 600) <= one.get("max_pixels", 9000)),
)


@given(videos, limits)
@settings(max_examples=60, deadline=None)
def test_arrays_of_videos(ours: Qwen3VLProcessor, video: Any, options: dict[str, int]) -> None:
    """The size, the patches and the tokens of transformers' processors, and the pixels that its
    image processor makes of each frame. transformers refuses a single frame."""
    module = video_module("qwen3_vl")
    frames, fps = video
    count, height, width, _ = frames.shape
    least = options.get("min_pixels", SIZE["shortest_edge"])
    most = options.get("max_pixels", SIZE["longest_edge"])
    size = module.smart_resize(max(count, 2), height, width, 2, 2 * PATCH, least, most)
    pixels = torch.from_numpy(peer_frames(their_images(), frames, size))
    patchify = module.Qwen3VLVideoProcessor.patchify
    expected, *grid = patchify(None, pixels[None], PATCH, 2, 2)
    found = ours.process("video", as_video(video), options)
    np.testing.assert_allclose(found.arrays["pixel_values_videos"], expected[0], atol=1e-5)
    assert found.arrays["video_grid_thw"].tolist() == grid

    theirs: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token=SPECIAL[0],
        vision_end_token=SPECIAL[2],
        video_token=SPECIAL[3],
    )
    theirs._calculate_timestamps = TheirProcessor._calculate_timestamps.__get__(theirs)
    metadata = SimpleNamespace(fps=fps, frames_indices=list(range(count)))
    given = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    text = TheirProcessor.replace_video_token(theirs, given, 0)
    assert list(found.token_ids) == ours.tokenizer.encode(text, add_special_tokens=False)
    assert found.is_row is not None
    assert found.is_row.tolist() == [token == VIDEO for token in found.token_ids]


def test_the_text_of_times(ours: Qwen3VLProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time is halfway between those of the two frames."""
    texts: list[str] = []
    encode = ours.tokenizer.encode

    def kept(text: str, *, add_special_tokens: bool) -> Sequence[int]:
        texts.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(ours.tokenizer, "encode", kept)
    frames, _ = random_video(5, 20, 20)
    ours.process("video", Video(frames, 1.0, (0.0, 0.5, 2.0, 4.2, 9.0)), {})
    assert texts == ["<0.2 seconds>", "<3.1 seconds>", "<9.0 seconds>"]


@given(st.integers(1, 150), st.integers(1, 150), limits)
@settings(max_examples=40, deadline=None)
def test_images(ours: Qwen3VLProcessor, width: int, height: int, options: Any) -> None:
    image = random_image(width, height)
    names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    size = {edge: options.get(name, SIZE[edge]) for edge, name in names.items()}
    theirs = Qwen2VLImageProcessorPil(patch_size=PATCH, size=size, **COLORS)
    expected = theirs([image], return_tensors="np")
    found = ours.process("image", image, options)
    np.testing.assert_array_equal(found.arrays["pixel_values"], expected["pixel_values"])
    assert list(found.token_ids) == [IMAGE] * (int(expected["image_grid_thw"].prod()) // 4)


parts = st.one_of(
    st.integers(1, 9),
    st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(2, 4), st.integers(1, 6), st.integers(1, 6)),
)


@given(st.lists(parts, min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_offsets(ours: Qwen3VLProcessor, parts: Sequence[Any]) -> None:
    """Texts of some tokens, and images and videos of (frames, height, width) tokens."""
    types: list[int] = []
    items: list[PlacedItem] = []
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    for part in parts:
        if isinstance(part, int):
            types += [0] * part
            continue
        frames, height, width = part
        kind = 1 if frames == 1 else 2
        start = len(types) + 1
        places = []
        for _ in range(frames):
            places.append((len(types) + 1 - start, (1, height, width)))
            types += [0, *[kind] * (height * width), 0]
        items.append(PlacedItem("", start, len(types) - 1, {"grids": places}))
        grids[kind].append([frames, 2 * height, 2 * width])
    whole = object.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(whole)
    whole.config = AutoConfig.for_model("qwen3_vl")
    given = [torch.tensor(each) if each else None for each in grids.values()]
    ids = torch.zeros(1, len(types), dtype=torch.long)
    expected, _ = whole.get_rope_index(ids, torch.tensor([types]), *given)
    found = ours.inputs([0] * len(types), items)
    assert list(found) == list(AXES)
    assert torch.tensor(list(found.values())).equal(expected[:, 0] - torch.arange(len(types)))


def test_how_videos_are_processed(tmp_path: Path, ours: Qwen3VLProcessor) -> None:
    """The file for images counts if there is none for videos, and then the values of
    transformers."""
    assert ours.videos["size"] == SIZE
    other = make(tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text("{}")
    found = Qwen3VLProcessor(None, image_setup(tmp_path, CONFIG, SPECIAL)).videos
    theirs = video_module("qwen3_vl").Qwen3VLVideoProcessor
    for name in other.videos:
        value = getattr(theirs, name)
        assert found[name] == (tuple(value) if isinstance(value, list) else value)


def test_the_placeholder(ours: Qwen3VLProcessor) -> None:
    assert ours.placeholder("image").token_ids == (IMAGE,)
    assert ours.placeholder("video").token_ids == (START, VIDEO, END)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharpen": 2}, "sharpen; the image processor Qwen2VLImageProcessorPil takes"),
        ({"max_pixels": 0}, "max_pixels=0; expected whole numbers"),
        ({"do_resize": False}, "video could not be processed with {'do_resize': False}"),
    ],
)
def test_options_that_are_refused(
    ours: Qwen3VLProcessor, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ours.process("video", as_video(random_video(2, 50, 51)), options)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_thin_videos(ours: Qwen3VLProcessor) -> None:
    with pytest.raises(RequestError, match="200 times"):
        ours.process("video", as_video(random_video(2, 2000, 8)), {})


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_qwen_vl.deep_processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
