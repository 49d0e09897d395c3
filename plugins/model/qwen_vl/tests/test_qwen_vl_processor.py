"""The processor, compared with that of transformers, on images of many sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_qwen_vl.processor import QwenVLProcessor
from pegboard_model_qwen_vl.sizes import AXES
from PIL import Image
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup, PlacedItem
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard_testing.contract_generic import check_entry, installed_entry

IMAGE = 3
PATCH = 4
VISION = {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
LIMITS = {"min_pixels": 200, "max_pixels": 3000}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_contract(kind: str, name: str) -> None:
    check_entry(installed_entry(kind, f"{name}ForConditionalGeneration"))


def their_images() -> Any:
    return Qwen2VLImageProcessorPil(patch_size=PATCH, **LIMITS)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> QwenVLProcessor:
    folder = tmp_path_factory.mktemp("qwen_vl")
    their_images().save_pretrained(folder)
    checkpoint = Checkpoint(
        format="safetensors",
        path=folder,
        config={"vision_config": VISION, "image_token_id": IMAGE},
        architectures=(),
        tensors={},
        tokenizer=TokenizerPayload("hf", folder),
    )
    unused: Any = None
    return QwenVLProcessor(None, MultiModalProcessorSetup(checkpoint, unused))


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


def test_limits_change_the_number_of_tokens(ours: QwenVLProcessor) -> None:
    image = Image.new("RGB", (64, 64))

    def count(**options: Any) -> int:
        return len(ours.process("image", image, options).token_ids)

    assert count(max_pixels=500) < count() < count(min_pixels=8000, max_pixels=9000)
    size = {"shortest_edge": 8000, "longest_edge": 9000}
    assert count(size=size) == count(min_pixels=8000, max_pixels=9000)


parts = st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 9), st.integers(1, 9)))


@pytest.mark.parametrize(
    ("kind", "model"), [("qwen2_vl", Qwen2VLModel), ("qwen2_5_vl", Qwen2_5_VLModel)]
)
@given(st.lists(parts, min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_offsets(ours: QwenVLProcessor, kind: str, model: Any, parts: Sequence[Any]) -> None:
    """Texts of some tokens, and images of (height, width) tokens between those that begin and end
    them."""
    tokens: list[int] = []
    items: list[PlacedItem] = []
    for part in parts:
        if isinstance(part, int):
            tokens += [9] * part
            continue
        start = len(tokens) + 1
        stop = start + part[0] * part[1]
        tokens += [7, *[IMAGE] * (stop - start), 8]
        items.append(PlacedItem("image", start, stop, {"grid": part}))
    whole = object.__new__(model)
    torch.nn.Module.__init__(whole)
    whole.config = AutoConfig.for_model(kind)
    ids = torch.tensor([tokens])
    grids = torch.tensor([[1, *(2 * side for side in item.facts["grid"])] for item in items])
    expected, _ = whole.get_rope_index(ids, (ids == IMAGE).int(), grids if items else None)
    places = torch.arange(len(tokens))
    found = ours.inputs(tokens, items)
    assert list(found) == list(AXES)
    assert torch.tensor(list(found.values())).equal(expected[:, 0] - places)


def test_the_placeholder(ours: QwenVLProcessor) -> None:
    found = ours.placeholder("image")
    assert found.text == "<|vision_start|><|image_pad|><|vision_end|>"
    assert found.token_ids == (IMAGE,)


@pytest.mark.parametrize("size", [(201, 1), (2, 500)])
def test_thin_images(ours: QwenVLProcessor, size: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match=f"has {size[0]} × {size[1]} pixels; .* 200 times"):
        ours.process("image", Image.new("RGB", size), {})


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


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_qwen_vl.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
