"""The processors, compared with those of transformers, on images of many sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_llava.processor import (
    LlavaNextProcessor,
    LlavaOnevisionProcessor,
    LlavaProcessor,
)
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import (
    LlavaOnevisionProcessor as TheirOnevision,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard_testing.contract_generic import check_entry, installed_entry

IMAGE_TOKEN = 3
SIDE = 40
PATCH = 9
CLIP = {
    "model_type": "clip_vision_model",
    "image_size": SIDE,
    "patch_size": PATCH,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
SIZE = {"height": SIDE, "width": SIDE}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
@pytest.mark.parametrize(
    "name",
    [
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
    ],
)
def test_contract(kind: str, name: str) -> None:
    check_entry(installed_entry(kind, name))


def clip_images(**more: Any) -> Any:
    return CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIZE, **more)


@cache
def tokenizer() -> Any:
    words = {word: place for place, word in enumerate(["<s>", "</s>", "<unk>", "<image>", "a"])}
    own = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="<unk>", pad_token="<unk>"
    )
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert made.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    return made


def setup_of(folder: Path, config: Mapping[str, Any]) -> MultiModalProcessorSetup:
    payload = TokenizerPayload("hf", folder)
    checkpoint = Checkpoint(
        format="safetensors",
        path=folder,
        config=config,
        architectures=(),
        tensors={},
        tokenizer=payload,
    )
    own: Any = None
    return MultiModalProcessorSetup(checkpoint, own)


def config_of(vision: Mapping[str, Any], strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "vision_config": vision,
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_select_strategy": strategy,
        **more,
    }


@st.composite
def images(draw: st.DrawFn, largest: int = 150) -> Image.Image:
    """RGB images of random sizes, with random pixels."""
    width, height = draw(st.tuples(*[st.integers(1, largest)] * 2))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


CASES: dict[str, tuple[Mapping[str, Any], str, Callable[[], Any], int]] = {
    "clip": (CLIP, "default", clip_images, 1),
    "clip, full": (CLIP, "full", clip_images, 1),
    "clip, other pixels": (
        CLIP,
        "default",
        lambda: clip_images(do_normalize=False, rescale_factor=0.5, resample=2),
        1,
    ),
    "siglip": (SIGLIP, "full", lambda: SiglipImageProcessorPil(size=SIZE), 0),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LlavaProcessor]:
    """Return transformers' processor and ours, of one checkpoint."""
    vision, strategy, make, num_additional = CASES[request.param]
    folder = tmp_path_factory.mktemp("llava")
    theirs = transformers.LlavaProcessor(
        image_processor=make(),
        tokenizer=tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=num_additional,
    )
    theirs.save_pretrained(folder)
    return theirs, LlavaProcessor(None, setup_of(folder, config_of(vision, strategy)))


@given(images())
@settings(max_examples=25, deadline=None)
def test_llava(pair: tuple[Any, LlavaProcessor], image: Image.Image) -> None:
    theirs, ours = pair
    if 150 * min(image.size) < max(image.size):
        return
    expected = theirs(images=image, text="a <image> a", return_tensors="np")
    found = ours.process("image", image, {})
    np.testing.assert_array_equal(found.arrays["pixel_values"], expected["pixel_values"][0])
    assert found.arrays["pixel_values"].dtype == np.float32
    a = theirs.tokenizer.convert_tokens_to_ids("a")
    assert [a, *found.token_ids, a] == expected["input_ids"][0].tolist()
    assert found.is_row is None


PINPOINTS = [[40, 80], [80, 40], [80, 80], [120, 40], [40, 120]]


def next_images() -> Any:
    size = {"shortest_edge": SIDE}
    return LlavaNextImageProcessorPil(size=size, crop_size=SIZE, image_grid_pinpoints=PINPOINTS)


@pytest.fixture(scope="module")
def next_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LlavaNextProcessor]:
    folder = tmp_path_factory.mktemp("llava_next")
    theirs = transformers.LlavaNextProcessor(
        image_processor=next_images(),
        tokenizer=tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    theirs.save_pretrained(folder)
    config = config_of(CLIP, "default", image_grid_pinpoints=PINPOINTS)
    return theirs, LlavaNextProcessor(None, setup_of(folder, config))


@given(images())
@settings(max_examples=60, deadline=None)
def test_llava_next(next_pair: tuple[Any, LlavaNextProcessor], image: Image.Image) -> None:
    theirs, ours = next_pair
    if 20 * min(image.size) < max(image.size):
        return
    expected = theirs(images=image, text="a <image> a", return_tensors="np")
    found = ours.process("image", image, {})
    np.testing.assert_array_equal(found.arrays["pixel_values"], expected["pixel_values"][0])
    assert found.arrays["image_sizes"].tolist() == expected["image_sizes"][0].tolist()
    a = theirs.tokenizer.convert_tokens_to_ids("a")
    assert [a, *found.token_ids, a] == expected["input_ids"][0].tolist()


@pytest.fixture(scope="module", params=["anyres_max_1", "anyres_max_2", "anyres_max_9"])
def onevision_images(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Callable[[Image.Image], int], LlavaOnevisionProcessor]:
    """Return transformers' image processor, its number of tokens, and our processor. Their
    processor of both needs a package for video."""
    folder = tmp_path_factory.mktemp("onevision")
    theirs = LlavaOnevisionImageProcessorPil(size=SIZE, image_grid_pinpoints=PINPOINTS)
    theirs.save_pretrained(folder)
    whole: Any = object.__new__(TheirOnevision)
    whole.image_processor = theirs
    whole.num_image_tokens = (SIDE // PATCH) ** 2
    whole.vision_aspect_ratio = request.param

    def count(image: Image.Image) -> int:
        size = image.height, image.width
        return int(whole._get_number_of_features(*size, SIDE, SIDE))

    config = {
        "vision_config": SIGLIP,
        "image_token_index": IMAGE_TOKEN,
        "image_grid_pinpoints": PINPOINTS,
        "vision_aspect_ratio": request.param,
    }
    return theirs, count, LlavaOnevisionProcessor(None, setup_of(folder, config))


@given(images())
@settings(max_examples=40, deadline=None)
def test_llava_onevision(onevision_images: Any, image: Image.Image) -> None:
    theirs, count, ours = onevision_images
    if 20 * min(image.size) < max(image.size):
        return
    expected = theirs(image, return_tensors="np")
    found = ours.process("image", image, {})
    np.testing.assert_array_equal(found.arrays["pixel_values"], expected["pixel_values"][0])
    assert found.arrays["image_sizes"].tolist() == expected["image_sizes"][0].tolist()
    assert found.token_ids == [IMAGE_TOKEN] * count(image)


@pytest.mark.parametrize("value", ["anyres", "anyres_max_", "anyres_max_0", 9])
def test_an_aspect_ratio_that_is_wrong(tmp_path: Path, value: Any) -> None:
    next_images().save_pretrained(tmp_path)
    config = {"vision_config": SIGLIP, "vision_aspect_ratio": value}
    config |= {"image_grid_pinpoints": PINPOINTS}
    with pytest.raises(ModelError, match="such as 'anyres_max_9'"):
        LlavaOnevisionProcessor(None, setup_of(tmp_path, config))


def test_values_that_a_config_lacks() -> None:
    assert transformers.LlavaConfig().image_token_index == LlavaProcessor.image_token
    assert transformers.LlavaNextConfig().image_token_index == LlavaNextProcessor.image_token
    whole = transformers.LlavaOnevisionConfig()
    assert whole.image_token_index == LlavaOnevisionProcessor.image_token
    assert LlavaOnevisionProcessor.defaults.items() <= whole.to_dict().items()


def test_the_resolutions_cannot_be_changed(next_pair: tuple[Any, LlavaNextProcessor]) -> None:
    with pytest.raises(RequestError, match="has image_grid_pinpoints"):
        next_pair[1].process(
            "image", Image.new("RGB", (9, 9)), {"image_grid_pinpoints": [[40, 40]]}
        )


@pytest.mark.parametrize(
    ("pinpoints", "strategy", "message"),
    [
        ([[40, 79]], "default", "expected multiples of the tower's image_size=40"),
        ([], "default", "expected a list of"),
        ([[40]], "default", "expected a list of"),
        ("all", "default", "expected a list of"),
        (PINPOINTS, "full", "vision_feature_select_strategy='default'"),
    ],
)
def test_tiles_that_are_refused(
    tmp_path: Path, pinpoints: Any, strategy: str, message: str
) -> None:
    next_images().save_pretrained(tmp_path)
    config = config_of(CLIP, strategy, image_grid_pinpoints=pinpoints)
    with pytest.raises(ModelError, match=message):
        LlavaNextProcessor(None, setup_of(tmp_path, config))


def test_the_placeholder(pair: tuple[Any, LlavaProcessor]) -> None:
    found = pair[1].placeholder("image")
    assert tuple(tokenizer().encode(found.text, add_special_tokens=False)) == found.token_ids


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_either_file(tmp_path: Path, name: str) -> None:
    """Older checkpoints have the former, and newer ones the latter."""
    clip_images().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    is_older = name.startswith("pre")
    stored = written if is_older else {"image_processor": written}
    (tmp_path / name).write_text(json.dumps(stored))
    processor = LlavaProcessor(None, setup_of(tmp_path, config_of(CLIP, "default")))
    found = processor.process("image", Image.new("RGB", (31, 77), (1, 2, 3)), {})
    expected = clip_images()(Image.new("RGB", (31, 77), (1, 2, 3)), return_tensors="np")
    np.testing.assert_array_equal(found.arrays["pixel_values"], expected["pixel_values"][0])


def test_options_of_a_request(tmp_path: Path) -> None:
    clip_images(do_normalize=False).save_pretrained(tmp_path)
    processor = LlavaProcessor(None, setup_of(tmp_path, config_of(CLIP, "default")))
    image = Image.new("RGB", (50, 50), (51, 51, 51))

    def value(options: Mapping[str, Any]) -> float:
        return float(processor.process("image", image, options).arrays["pixel_values"][0, 0, 0])

    assert value({}) == pytest.approx(0.2)
    assert value({"rescale_factor": 1.0}) == pytest.approx(51)
    assert value({"do_normalize": True}) == pytest.approx(
        (0.2 - clip_images().image_mean[0]) / clip_images().image_std[0]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharpen": 2}, "sharpen; the image processor CLIPImageProcessorPil takes crop_size"),
        ({"crop_size": {"height": 9, "width": 9}}, r"takes \[3, 40, 40\]"),
        ({"rescale_factor": "a"}, "could not be processed"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: Mapping[str, Any], message: str) -> None:
    clip_images().save_pretrained(tmp_path)
    processor = LlavaProcessor(None, setup_of(tmp_path, config_of(CLIP, "default")))
    with pytest.raises(RequestError, match=message) as caught:
        processor.process("image", Image.new("RGB", (50, 50)), options)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_a_checkpoint_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither preprocessor_config\.json nor"):
        LlavaProcessor(None, setup_of(tmp_path, config_of(CLIP, "default")))


@pytest.mark.parametrize("text", ["{", '{"image_processor_type": "Nothing"}', "[]"])
def test_a_file_that_is_wrong(tmp_path: Path, text: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ModelError, match="the image processor cannot be loaded"):
        LlavaProcessor(None, setup_of(tmp_path, config_of(CLIP, "default")))


@pytest.mark.parametrize("token", [-1, "a", 1.5])
def test_a_token_that_is_wrong(tmp_path: Path, token: Any) -> None:
    with pytest.raises(ModelError, match="expected the id of a token"):
        LlavaProcessor(
            None, setup_of(tmp_path, config_of(CLIP, "default", image_token_index=token))
        )


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_llava.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
