"""The processor, compared with those of transformers, on images of many sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from pegboard_model_idefics3.processor import Idefics3Processor
from pegboard_model_idefics3.sizes import IMAGE_TOKEN
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import check_form
from pegboard_testing.media_peers import (
    check_image,
    check_placeholder,
    idefics3_processor,
    image_setup,
    random_images,
    word_tokenizer,
)

SIDE = 20
GRID = 4
FRAME, WHOLE, MARK = "<fake_token_around_image>", "<global-img>", "<image>"
PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
END = "<end_of_utterance>"
SPECIAL = [FRAME, WHOLE, MARK, *PLACES, END, "\n", "\n\n"]
OTHERS = [FRAME, WHOLE, MARK, END]
"""The places of tiles are ordinary text."""
VISION = {"model_type": "idefics3", "image_size": SIDE, "patch_size": SIDE // GRID}
IMAGES = {"size": {"longest_edge": 3 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
CASES: dict[str, tuple[list[str], int, dict[str, Any]]] = {
    "tiles": (SPECIAL, 2, {}),
    "merged by four": (SPECIAL, 4, {}),
    "whole": (SPECIAL, 2, {"do_image_splitting": False}),
    "places of several tokens": (OTHERS, 2, {}),
}


@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
@pytest.mark.parametrize("family", ["Idefics3", "SmolVLM"])
def test_contract(kind: str, family: str) -> None:
    check_entry(installed_entry(kind, f"{family}ForConditionalGeneration"))


def images(**more: Any) -> Any:
    return transformers.Idefics3ImageProcessorPil(**IMAGES, **more)


def setup_of(folder: Path, special: list[str] = SPECIAL, **config: Any) -> MultiModalProcessorSetup:
    token = 2 + special.index(MARK)
    return image_setup(
        folder, {"vision_config": VISION, "image_token_id": token, **config}, special
    )


@pytest.fixture(scope="module", params=CASES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return transformers' processor and ours, of one checkpoint."""
    special, scale, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("idefics3")
    rows = (GRID // scale) ** 2
    theirs = idefics3_processor(images(**options), word_tokenizer(special), rows=rows)
    theirs.save_pretrained(folder)
    return theirs, Idefics3Processor(None, setup_of(folder, special, scale_factor=scale))


@given(random_images())
@settings(max_examples=40, deadline=None)
def test_images_of_any_size(pair: Any, image: Any) -> None:
    processed = check_image(*pair, MARK, image, is_batched=True)
    num_rows = len(processed.arrays["pixel_values"]) * pair[0].image_seq_len
    assert processed.is_row.sum() == num_rows
    tiles = pair[0].image_processor(image, return_row_col_info=True)
    check_form(pair[1], "image", processed, {name: tiles[name][0] for name in ("rows", "cols")})


@pytest.mark.parametrize(("height", "width"), [(0, 3), (3, 0), (1, 2), (10**9, 10**9)])
def test_rows_of_other_tiles(tmp_path: Path, height: int, width: int) -> None:
    images().save_pretrained(tmp_path)
    ours = Idefics3Processor(None, setup_of(tmp_path))
    form = {"rows": np.array([height]), "cols": np.array([width])}
    with pytest.raises(RequestError, match=rf"rows × cols tiles .* got {height} × {width}"):
        ours.place_formed_rows("image", 4, form)


@pytest.mark.parametrize(("height", "width"), [(0, 0), (1, 2), (3, 1), (4, 4)])
def test_the_text_of_smolvlm(tmp_path: Path, height: int, width: int) -> None:
    images().save_pretrained(tmp_path)
    ours = Idefics3Processor(None, setup_of(tmp_path))
    assert ours.text(height, width) == get_image_prompt_string(height, width, 4, FRAME, MARK, WHOLE)


def test_the_placeholder(pair: Any) -> None:
    check_placeholder(*pair)


def test_splitting_is_an_option(tmp_path: Path) -> None:
    images().save_pretrained(tmp_path)
    ours = Idefics3Processor(None, setup_of(tmp_path))
    image = Image.new("RGB", (60, 30))
    assert len(ours.process("image", image, {}).arrays["pixel_values"]) == 7
    found = ours.process("image", image, {"do_image_splitting": False})
    assert found.arrays["pixel_values"].shape == (1, 3, SIDE, SIDE)
    assert len(found.token_ids) == 4 + 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_image_size": {"longest_edge": 9}}, r"takes \[3, 20, 20\]"),
        ({"return_row_col_info": False}, "mm_processor_kwargs has return_row_col_info"),
        ({"size": {"shortest_edge": 4}}, "could not be processed"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    images().save_pretrained(tmp_path)
    ours = Idefics3Processor(None, setup_of(tmp_path))
    with pytest.raises(RequestError, match=message):
        ours.process("image", Image.new("RGB", (31, 29)), options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"scale_factor": 3}, "cannot be merged by 3"),
        ({"scale_factor": True}, "scale_factor=True; expected a positive whole number"),
        ({"vision_config": {"image_size": "a"}}, "image_size='a'"),
        ({"image_token_id": -1}, "expected the id of a token"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    images().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        Idefics3Processor(None, setup_of(tmp_path, **config))


def test_values_that_a_config_lacks() -> None:
    for theirs in (transformers.Idefics3Config(), transformers.SmolVLMConfig()):
        assert theirs.image_token_id == IMAGE_TOKEN
        assert theirs.scale_factor == 2


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_idefics3.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
