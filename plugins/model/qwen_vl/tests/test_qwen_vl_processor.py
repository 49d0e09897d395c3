"""The processor, compared with that of transformers, on images of many sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_qwen_vl.processor import Qwen25VLProcessor, QwenVLProcessor
from PIL import Image
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup, PlacedItem
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard_models.patch_sizes import AXES
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import check_form
from pegboard_testing.video_peers import as_video, peer_frames, random_video, video_module

IMAGE = 3
VIDEO = 4
PATCH = 4
VISION = {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
LIMITS = {"min_pixels": 200, "max_pixels": 3000}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_contract(kind: str, name: str) -> None:
    check_entry(installed_entry(kind, f"{name}ForConditionalGeneration"))


def their_images() -> Any:
    return Qwen2VLImageProcessorPil(patch_size=PATCH, **LIMITS)


def written(folder: Path, *, with_videos: bool = False) -> MultiModalProcessorSetup:
    """Write the processors' files, and return what ours is built of."""
    their_images().save_pretrained(folder)
    if with_videos:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(LIMITS))
    return setup_of(folder)


def setup_of(folder: Path) -> MultiModalProcessorSetup:
    checkpoint = Checkpoint(
        format="safetensors",
        path=folder,
        config={"vision_config": VISION, "image_token_id": IMAGE, "video_token_id": VIDEO},
        architectures=(),
        tensors={},
        tokenizer=TokenizerPayload("hf", folder),
    )
    unused: Any = None
    return MultiModalProcessorSetup(checkpoint, unused)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> MultiModalProcessorSetup:
    return written(tmp_path_factory.mktemp("qwen_vl"))


@pytest.fixture(scope="module")
def ours(setup: MultiModalProcessorSetup) -> QwenVLProcessor:
    return QwenVLProcessor(None, setup)


@st.composite
def images(draw: st.DrawFn, largest: int = 150) -> Image.Image:
    """RGB images of random sizes, with random pixels."""
    width, height = draw(st.tuples(*[st.integers(1, largest)] * 2))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


limits = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {}, optional={"min_pixels": st.integers(1, 3000), "max_pixels": st.integers(200, 20000)}
    ).filter(lambda one: one.get("min_pixels", 200) <= one.get("max_pixels", 3000)),
)


@given(images(), limits)
@settings(max_examples=60, deadline=None)
def test_arrays(ours: QwenVLProcessor, image: Image.Image, options: dict[str, int]) -> None:
    theirs = Qwen2VLImageProcessorPil(patch_size=PATCH, **{**LIMITS, **options})
    expected = theirs(image, return_tensors="np")
    found = ours.process("image", image, options)
    np.testing.assert_array_equal(found.arrays["pixel_values"], expected["pixel_values"])
    np.testing.assert_array_equal(found.arrays["image_grid_thw"], expected["image_grid_thw"][0])
    assert found.arrays["pixel_values"].dtype == np.float32
    count = theirs.get_number_of_image_patches(image.height, image.width)
    assert found.token_ids == [IMAGE] * (count // 4)
    assert found.is_row is None
    check_form(ours, "image", found, {"image_grid_thw": found.arrays["image_grid_thw"]})


@pytest.mark.parametrize("grid", [[2, 4, 4], [1, 4, 3], [1, 3, 4], [1, 0, 4], [1, 2, 4], [4, 4]])
def test_rows_of_another_grid(ours: QwenVLProcessor, grid: list[int]) -> None:
    with pytest.raises(RequestError, match="image_grid_thw, .1, height, width. in patches"):
        ours.place_formed_rows("image", 4, {"image_grid_thw": np.array(grid)})


def test_rows_of_a_video(ours: QwenVLProcessor) -> None:
    with pytest.raises(RequestError, match="the rows of images, not those of type video"):
        ours.place_formed_rows("video", 4, {"video_grid_thw": np.array([1, 4, 4])})


def test_limits_change_the_number_of_tokens(ours: QwenVLProcessor) -> None:
    image = Image.new("RGB", (64, 64))

    def count(**options: Any) -> int:
        return len(ours.process("image", image, options).token_ids)

    assert count(max_pixels=500) < count() < count(min_pixels=8000, max_pixels=9000)
    size = {"shortest_edge": 8000, "longest_edge": 9000}
    assert count(size=size) == count(min_pixels=8000, max_pixels=9000)


videos = st.builds(
    random_video,
    st.integers(1, 7),
    st.integers(4, 90),
    st.integers(4, 90),
    st.floats(0.1, 60),
    st.integers(0, 99),
)


@given(videos, limits)
@settings(max_examples=40, deadline=None)
def test_arrays_of_videos(ours: QwenVLProcessor, video: Any, options: dict[str, int]) -> None:
    """The size and the patches of transformers' video processor, and the pixels that its image
    processor makes of each frame."""
    module = video_module("qwen2_vl")
    frames = video[0]
    height, width = frames.shape[1:3]
    theirs = {**LIMITS, **options}
    size = module.smart_resize(height, width, factor=2 * PATCH, **theirs)
    pixels = torch.from_numpy(peer_frames(their_images(), frames, size))
    patchify = module.Qwen2VLVideoProcessor.patchify
    expected, *grid = patchify(None, pixels[None], PATCH, 2, 2)
    found = ours.process("video", as_video(video), options)
    np.testing.assert_allclose(found.arrays["pixel_values_videos"], expected[0], atol=1e-5)
    assert found.arrays["pixel_values_videos"].dtype == np.float32
    assert found.arrays["video_grid_thw"].tolist() == grid
    assert found.token_ids == [VIDEO] * (grid[0] * grid[1] * grid[2] // 4)


@given(st.integers(1, 4))
@settings(deadline=None)
def test_a_still_video_is_an_image(ours: QwenVLProcessor, count: int) -> None:
    image = Image.fromarray(random_video(1, 37, 21)[0][0])
    frames = np.stack([np.asarray(image)] * count)
    expected = ours.process("image", image, {}).arrays["pixel_values"]
    found = ours.process("video", as_video((frames, 2.0)), {}).arrays["pixel_values_videos"]
    np.testing.assert_allclose(found, np.tile(expected, (-(-count // 2), 1)), atol=1e-5)


def test_how_videos_are_processed(tmp_path: Path, setup: MultiModalProcessorSetup) -> None:
    """The file for videos counts, then the one for images, then the values of transformers."""
    assert QwenVLProcessor(None, setup).videos["size"] == {
        "shortest_edge": LIMITS["min_pixels"],
        "longest_edge": LIMITS["max_pixels"],
    }
    ours = QwenVLProcessor(None, written(tmp_path, with_videos=True))
    assert ours.videos["size"] == QwenVLProcessor(None, setup).videos["size"]
    module = video_module("qwen2_vl")
    theirs = {name: getattr(module.Qwen2VLVideoProcessor, name) for name in ours.videos}
    (tmp_path / "video_preprocessor_config.json").write_text("{}")
    found = QwenVLProcessor(None, setup_of(tmp_path)).videos
    assert {name: found[name] for name in theirs} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in theirs.items()
    }


parts = st.one_of(
    st.integers(1, 9),
    st.tuples(st.just(1), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
)


@pytest.mark.parametrize(
    ("kind", "model"), [("qwen2_vl", Qwen2VLModel), ("qwen2_5_vl", Qwen2_5_VLModel)]
)
@given(st.lists(parts, min_size=1, max_size=8), st.floats(0.05, 3.0))
@settings(max_examples=60, deadline=None)
def test_offsets(
    ours: QwenVLProcessor, kind: str, model: Any, parts: Sequence[Any], seconds: float
) -> None:
    """Texts of some tokens, and images and videos of (frames, height, width) tokens between those
    that begin and end them. Text goes on after the largest position, as in the paper; transformers
    forgets the times there, so it is asked for one item after the other."""
    tokens: list[int] = []
    types: list[int] = []
    items: list[PlacedItem] = []
    interval = 1.0 if kind == "qwen2_vl" else 4.0 * seconds
    for part in parts:
        if isinstance(part, int):
            tokens += [9] * part
            types += [0] * part
            continue
        modality = "image" if part[0] == 1 else "video"
        count = part[0] * part[1] * part[2]
        start = len(tokens) + 1
        tokens += [7, *[IMAGE] * count, 8]
        types += [0, *[1 if modality == "image" else 2] * count, 0]
        facts: dict[str, Any] = {"grids": [(0, part)]}
        if modality == "video":
            facts["interval"] = interval
        items.append(PlacedItem(modality, start, start + count, facts))
    whole = object.__new__(model)
    torch.nn.Module.__init__(whole)
    whole.config = AutoConfig.for_model(kind)
    expected = []
    position = done = 0
    for item in items:
        text = torch.arange(item.start - done).expand(3, -1) + position
        position += item.start - done
        frames, height, width = item.facts["grids"][0][1]
        step = torch.tensor(interval) if item.modality == "video" else 1
        grid = torch.tensor([frames, 2 * height, 2 * width])
        seen = whole.get_vision_position_ids(position, grid, 1, 2, step)
        expected += [text, seen]
        position = int(seen.max()) + 1
        done = item.stop
    expected.append(torch.arange(len(tokens) - done).expand(3, -1) + position)
    places = torch.arange(len(tokens))
    found = ours.inputs(tokens, items)
    assert list(found) == list(AXES)
    assert torch.tensor(list(found.values())).equal(torch.cat(expected, 1) - places)
    if all(item.modality == "image" for item in items):
        grids = torch.tensor(
            [[1, *(2 * n for n in item.facts["grids"][0][1][1:])] for item in items]
        )
        ids = torch.tensor([tokens])
        theirs, _ = whole.get_rope_index(ids, torch.tensor([types]), grids if items else None)
        assert theirs[:, 0].equal(torch.cat(expected, 1))


@given(videos)
@settings(max_examples=20, deadline=None)
def test_the_interval(setup: MultiModalProcessorSetup, video: Any) -> None:
    """As transformers' second_per_grid_ts, times tokens_per_second."""
    later = Qwen25VLProcessor(None, setup)
    assert later.process("video", as_video(video), {}).facts["interval"] == 4 * 2 / video[1]
    assert AutoConfig.for_model("qwen2_5_vl").vision_config.tokens_per_second == 4
    assert QwenVLProcessor(None, setup).process("video", as_video(video), {}).facts["interval"] == 1


def test_the_placeholder(ours: QwenVLProcessor) -> None:
    for modality, token in (("image", IMAGE), ("video", VIDEO)):
        found = ours.placeholder(modality)
        assert found.text == f"<|vision_start|><|{modality}_pad|><|vision_end|>"
        assert found.token_ids == (token,)


@pytest.mark.parametrize("size", [(201, 1), (2, 500)])
def test_thin_images(ours: QwenVLProcessor, size: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match=f"has {size[0]} × {size[1]} pixels; .* 200 times"):
        ours.process("image", Image.new("RGB", size), {})
    with pytest.raises(RequestError, match=f"has {size[0]} × {size[1]} pixels; .* 200 times"):
        ours.process("video", as_video(random_video(2, *size)), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharpen": 2}, "sharpen; the image processor Qwen2VLImageProcessorPil takes"),
        ({"patch_size": 5}, "has patch_size"),
        ({"merge_size": 1}, "has merge_size"),
        ({"temporal_patch_size": 1}, "has temporal_patch_size"),
        ({"min_pixels": "a"}, "gives min_pixels='a' and max_pixels=3000; expected whole"),
        ({"max_pixels": 0}, "max_pixels=0; expected whole numbers"),
        ({"min_pixels": 900, "max_pixels": 800}, "the first one not above the second one"),
        ({"size": 5, "max_pixels": 800}, "size=5; expected shortest_edge and longest_edge"),
        ({"do_resize": False}, "could not be processed"),
    ],
)
def test_options_that_are_refused(
    ours: QwenVLProcessor, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ours.process("image", Image.new("RGB", (50, 51)), options)
    assert caught.value.parameter == "mm_processor_kwargs"
    with pytest.raises(RequestError, match="video could|" + message) as caught:
        ours.process("video", as_video(random_video(2, 50, 51)), options)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_qwen_vl.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
