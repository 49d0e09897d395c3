"""The processor of Llama 4, compared with those of transformers, on images of many sizes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_llama4.processor import Llama4Processor
from pegboard_model_llama4.sizes import IMAGE_TOKEN, WIDTHS
from pegboard_model_llama4.tiles import DEFAULTS, canvases, rounded
from PIL import Image
from transformers import Llama4Config
from transformers.image_utils import SizeDict
from transformers.models.llama4.processing_llama4 import Llama4Processor as TheirProcessor

from pegboard.errors import ModelError, RequestError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    random_image,
)
from pegboard_testing.media_peers import ImageContract, image_setup
from pegboard_testing.video_peers import TORCHVISION

SIDE = 16
SPECIAL = [
    "<|image_start|>",
    "<|image|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image_end|>",
]
MARK, PATCH = 3, 4
VISION = {
    "image_size": SIDE,
    "patch_size": 4,
    "hidden_size": 24,
    "intermediate_size": 96,
    "num_attention_heads": 3,
    "projector_input_dim": 20,
    "projector_output_dim": 20,
    "vision_output_dim": 20,
}
CONFIG = {"vision_config": VISION, "image_token_index": PATCH}
FILE = {"size": {"height": SIDE, "width": SIDE}, "max_patches": 6}


def peer_module() -> Any:
    """Return transformers' module of the image processor. What it takes from torchvision is written
    with torch here."""
    import transformers.image_transforms

    modules: dict[str, Any] = {"torchvision": ModuleType("torchvision")}
    for name in TORCHVISION:
        module: Any = ModuleType(f"torchvision.{name}")
        parent, _, last = module.__name__.rpartition(".")
        setattr(modules[parent], last, module)
        modules[module.__name__] = module
    with mock.patch.dict(sys.modules, modules):
        found: Any = importlib.import_module("transformers.models.llama4.image_processing_llama4")
    found.tvF = SimpleNamespace(pad=padded)
    assert found.split_to_tiles is transformers.image_transforms.split_to_tiles
    return found


def padded(images: torch.Tensor, padding: Sequence[int], fill: Any) -> torch.Tensor:
    left, top, right, bottom = padding
    assert not any(fill)
    return torch.nn.functional.pad(images, (left, right, top, bottom))


def resized(images: torch.Tensor, size: Any, resample: int) -> torch.Tensor:
    """Resize uint8 [images, 3, height, width] with Pillow."""
    return torch.stack(
        [
            torch.from_numpy(
                np.array(
                    Image.fromarray(image.permute(1, 2, 0).numpy()).resize(
                        (int(size.width), int(size.height)), resample
                    )
                )
            ).permute(2, 0, 1)
            for image in images
        ]
    )


def normalized(images: torch.Tensor, mean: Any, std: Any) -> torch.Tensor:
    """As torchvision does: in the type of the images."""
    shape = (3, 1, 1)
    mean = torch.tensor(mean, dtype=images.dtype).view(shape)
    return (images - mean).div_(torch.tensor(std, dtype=images.dtype).view(shape))


def their_arrays(image: Image.Image, **options: Any) -> Mapping[str, Any]:
    module = peer_module()
    kind = module.Llama4ImageProcessor
    theirs = SimpleNamespace(resize=resized, normalize=normalized)
    theirs.rescale_and_normalize = kind.rescale_and_normalize.__get__(theirs)
    values = {
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "max_patches": FILE["max_patches"],
        "resize_to_max_canvas": False,
    }
    found: Mapping[str, Any] = kind._preprocess(
        theirs,
        [torch.from_numpy(np.array(image)).permute(2, 0, 1)],
        do_resize=True,
        size=SizeDict(height=SIDE, width=SIDE),
        resample=2,
        disable_grouping=True,
        return_tensors="pt",
        **{**values, **options},
    )
    return found


def make(folder: Path, **more: Any) -> Llama4Processor:
    (folder / "preprocessor_config.json").write_text(json.dumps({**FILE, **more}))
    return Llama4Processor(None, image_setup(folder, CONFIG, SPECIAL))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Llama4Processor:
    return make(tmp_path_factory.mktemp("llama4"))


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "Llama4ForConditionalGeneration"))


class TestContract(ImageContract):
    make = staticmethod(make)
    config = CONFIG
    special = SPECIAL

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return 4 * len(arrays["pixel_values"])


images = st.builds(random_image, st.integers(1, 150), st.integers(1, 150), st.integers(0, 99))
options = st.fixed_dictionaries(
    {}, optional={"max_patches": st.integers(1, 17), "resize_to_max_canvas": st.booleans()}
)


@given(images, options)
@settings(max_examples=150, deadline=None)
def test_images(ours: Llama4Processor, image: Any, options: dict[str, Any]) -> None:
    """The arrays of transformers' image processor, and the text of its processor."""
    expected = their_arrays(image, **options)
    found = ours.process("image", image, options)
    pixels = found.arrays["pixel_values"]
    assert pixels.dtype == np.float32
    np.testing.assert_array_equal(pixels, expected["pixel_values"].float().numpy())
    theirs: Any = SimpleNamespace(patch_size=4, downsample_ratio=4)
    theirs._prompt_split_image = TheirProcessor._prompt_split_image.__get__(theirs)
    text = TheirProcessor.replace_image_token(theirs, dict(expected), 0)
    tokenizer = image_setup(Path(), CONFIG, SPECIAL).tokenizer
    assert list(found.token_ids) == tokenizer.encode(text, add_special_tokens=False)
    assert found.is_row is not None
    assert found.is_row.tolist() == [token == PATCH for token in found.token_ids]


@given(st.integers(1, 20))
def test_canvases(most: int) -> None:
    theirs = peer_module().find_supported_resolutions(most, SizeDict(height=1, width=1))
    assert canvases(most) == theirs


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1))
def test_rounding(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    expected = torch.from_numpy(values.copy()).bfloat16().float().numpy()
    np.testing.assert_array_equal(rounded(values), expected)


def test_other_colors(tmp_path: Path) -> None:
    """What the file says is done."""
    colors = {"image_mean": [0.1, 0.4, 0.3], "image_std": [0.3, 0.2, 0.7], "rescale_factor": 0.01}
    image = random_image(50, 20)
    expected = their_arrays(image, **colors)["pixel_values"].float().numpy()
    found = make(tmp_path, **colors).process("image", image, {}).arrays["pixel_values"]
    np.testing.assert_array_equal(found, expected)
    plain = make(tmp_path, do_rescale=False, do_normalize=False).process("image", image, {})
    assert plain.arrays["pixel_values"].max() > 100


def test_values_of_transformers(tmp_path: Path) -> None:
    """They count if no file says how images are processed."""
    found = Llama4Processor(None, image_setup(tmp_path, CONFIG, SPECIAL)).values
    theirs = peer_module().Llama4ImageProcessor
    assert found == dict(DEFAULTS)
    for name, value in found.items():
        expected = getattr(theirs, name)
        assert value == (tuple(expected) if isinstance(expected, list) else expected)
    config = Llama4Config()
    assert config.image_token_index == IMAGE_TOKEN
    vision = config.vision_config.to_dict()
    assert {name: vision[name] for name in WIDTHS} == WIDTHS


def test_the_placeholder(ours: Llama4Processor) -> None:
    found = ours.placeholder("image")
    assert (found.text, found.token_ids) == ("<|image|>", (MARK,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 3}, "has size; the image processor takes max_patches, resize_to_max_canvas"),
        ({"max_patches": 0}, "max_patches=0; expected a whole number from 1 to 64"),
        ({"max_patches": 65}, "max_patches=65; expected"),
        ({"max_patches": True}, "max_patches=True; expected"),
        ({"resize_to_max_canvas": 1}, "resize_to_max_canvas=1; expected true or false"),
    ],
)
def test_options_that_are_refused(
    ours: Llama4Processor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ours.process("image", random_image(9, 9), options)
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio=0.3; expected 1 divided by"),
        ({"pixel_shuffle_ratio": 2}, "pixel_shuffle_ratio=2; expected 1 divided by"),
        ({"intermediate_size": 95}, "intermediate_size=95; expected 96, the width of 4 patches"),
        ({"projector_input_dim": 0}, "projector_input_dim=0; expected a whole number from 1"),
        ({"projector_input_dim": 8}, "projector_input_dim=8; expected 20, as its other widths"),
        ({"num_attention_heads": 12}, "expected heads of a multiple of 4 channels"),
        ({"image_size": 12}, "cannot be merged by 2"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = {**CONFIG, "vision_config": {**VISION, **change}}
    with pytest.raises(ModelError, match=message):
        Llama4Processor(None, image_setup(tmp_path, config, SPECIAL))


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_llama4.processor; "
        "assert not {'torch', 'transformers', 'PIL'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
