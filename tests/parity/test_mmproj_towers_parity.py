"""Pixtral, InternVL and Qwen-VL in two GGUF files, compared with transformers: configs, processors
and logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mmproj_files import round_values, text_parts, write_file
from mmproj_towers import WRITERS
from mmproj_towers import internvl as internvl_parts
from test_mmproj_parity import COLORS, ODD, describe, inputs_of, processor_of, settings_of
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    check_media,
    check_output,
    make_media_model,
    make_tokenizer,
    open_media_llm,
    prompt,
    some_prompts,
)
from tiny_models import divide
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from pegboard import SamplingParams
from pegboard.errors import ModelError
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.media_peers import internvl_processor, pixtral_processor

SIDE = 16
PATCH = 4
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
CONTEXT = ["<IMG_CONTEXT>", "<img>", "</img>"]
BREAKS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]


@dataclass
class Family:
    """A model with its processor, and how its files are written. kind: of the projector. mark:
    stands for an image. special: tokens of the vocabulary from 100 on. metadata: of the tower, that
    the writer does not know."""

    kind: str
    mark: str
    special: list[str]
    reference: MediaReference
    processor: Any
    metadata: dict[str, Any] = field(default_factory=dict)


def pixtral(kind: str, vision: Mapping[str, Any] | None = None, **more: Any) -> Family:
    merged = more.get("spatial_merge_size", 2 if kind == "mistral3" else 1)
    model = make_media_model(
        kind,
        text_config={"model_type": "mistral", "sliding_window": None, **MEDIA_TEXT},
        vision_config={"model_type": "pixtral", **VISION, **(vision or {})},
        image_token_id=100,
        tie_word_embeddings=False,
        **({"vision_feature_select_strategy": "full"} if kind == "llava" else {}),
        **{"vision_feature_layer": -1, **more},
    )
    processor = pixtral_processor(
        make_tokenizer(BREAKS, BREAKS[0]), patch_size=PATCH, merged=merged, longest_edge=SIDE
    )
    for name, values in COLORS.items():
        setattr(processor.image_processor, name, values)
    reference = MediaReference(Path(), model, inputs_of(processor))
    return Family("pixtral", BREAKS[0], BREAKS, reference, processor)


def internvl(text: str = "qwen2", vision: Mapping[str, Any] | None = None, **more: Any) -> Family:
    given = {"attention_bias": True, "norm_type": "layer_norm", **(vision or {})}
    model = make_media_model(
        "internvl",
        text_config={"model_type": text, **MEDIA_TEXT},
        vision_config={"model_type": "internvl_vision", **VISION, **given},
        image_token_id=100,
        tie_word_embeddings=False,
        **more,
    )
    tokenizer = make_tokenizer([*CONTEXT, "<video>"], CONTEXT[0])
    images = GotOcr2ImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, crop_to_patches=True, max_patches=3, **COLORS
    )
    rows = int((SIDE // PATCH * model.config.downsample_ratio) ** 2)
    processor = internvl_processor(images, tokenizer, rows=rows)
    reference = MediaReference(Path(), model, inputs_of(processor))
    tiles = {"clip.vision.preproc_min_tiles": 1, "clip.vision.preproc_max_tiles": 3}
    return Family("internvl", CONTEXT[0], CONTEXT, reference, processor, tiles)


FAMILIES: dict[str, Callable[[], Family]] = {
    "mistral3": lambda: pixtral("mistral3"),
    "pixtral": lambda: pixtral("llava"),
    "internvl": internvl,
}


def write(
    family: Family,
    folder: Path,
    stored: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> MediaReference:
    """Write both files, and return the reference with the first one. metadata, tensors: of the
    tower, beyond those of the model; None leaves one out."""
    model = family.reference.model
    round_values(model, stored)
    arch, text, values = text_parts(model, family.special)
    path = folder / "model.gguf"
    write_file(path, arch, text, values, stored)
    keys, parts = WRITERS[family.kind](model)
    chosen = {**keys, **family.metadata, **(metadata or {})}
    kept = {key: value for key, value in chosen.items() if value is not None}
    changed = {**parts, **(tensors or {})}
    written = {name: value for name, value in changed.items() if value is not None}
    write_file(folder / "mmproj-model.gguf", "clip", kept, written, stored)
    return replace(family.reference, directory=path)


CHOSEN: dict[str, dict[str, Any]] = {
    "chunks": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}


@pytest.mark.parametrize("stored", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(tmp_path: Path, name: str, stored: str) -> None:
    family = FAMILIES[name]()
    reference = write(family, tmp_path, stored)
    check_media(reference, some_prompts(family.mark), repeats=2, **settings_of(tmp_path))


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN.keys())
@pytest.mark.parametrize("name", FAMILIES)
def test_steps(tmp_path: Path, name: str, chosen: dict[str, Any]) -> None:
    family = FAMILIES[name]()
    reference = write(family, tmp_path, "Q8_0")
    check_media(reference, some_prompts(family.mark), **settings_of(tmp_path, **chosen))


@pytest.mark.parametrize("name", FAMILIES)
def test_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    divide(monkeypatch, 2, 2)
    family = FAMILIES[name]()
    reference = write(family, tmp_path)
    check_media(reference, some_prompts(family.mark), **settings_of(tmp_path))


OTHERS: dict[str, tuple[Callable[[], Family], dict[str, Any]]] = {
    "pixtral of SiLU, not merged": (
        lambda: pixtral(
            "mistral3", {"hidden_act": "silu"}, spatial_merge_size=1, multimodal_projector_bias=True
        ),
        {},
    ),
    "pixtral with another base": (
        lambda: pixtral(
            "llava",
            {"rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"}},
            multimodal_projector_bias=False,
        ),
        {"clip.rope.freq_base": 100.0},
    ),
    "internvl with norms of queries": (
        lambda: internvl(
            "qwen3",
            {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False},
            downsample_ratio=0.25,
        ),
        {},
    ),
    "internvl with llama": (lambda: internvl("llama", {"layer_norm_eps": 0.1}), {}),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS.keys())
def test_other_models(tmp_path: Path, case: tuple[Callable[[], Family], dict[str, Any]]) -> None:
    make, metadata = case
    family = make()
    reference = write(family, tmp_path, metadata=metadata)
    check_media(reference, some_prompts(family.mark), **settings_of(tmp_path))


def test_dropped_dimensions(tmp_path: Path) -> None:
    """Older converters drop dimensions of one."""
    family = internvl()
    _, tensors = internvl_parts(family.reference.model, is_dropped=True)
    assert tensors["v.class_embd"].shape == (32,)
    reference = write(family, tmp_path, tensors=tensors)
    check_media(reference, some_prompts(family.mark), **settings_of(tmp_path))


@pytest.fixture(scope="module", params=FAMILIES)
def processors(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Any]:
    family = FAMILIES[request.param]()
    reference = write(family, tmp_path_factory.mktemp("files"))
    return family, processor_of(describe(reference.directory))


@given(width=st.integers(2, 90), height=st.integers(2, 90), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_images(processors: tuple[Family, Any], width: int, height: int, seed: int) -> None:
    """Pixels and tokens, without any other file."""
    family, ours = processors
    if max(width, height) > 10 * min(width, height):
        return
    image = random_image(width, height, seed)
    expected = inputs_of(family.processor)(prompt(1, image, 2, mark=family.mark))
    processed = ours.process("image", image, {})
    pixels = expected["pixel_values"].numpy()
    shape = processed.arrays["pixel_values"].shape
    np.testing.assert_array_equal(processed.arrays["pixel_values"], pixels.reshape(shape))
    assert expected["input_ids"][0].tolist() == [1, *processed.token_ids, 2]


@pytest.mark.parametrize("name", FAMILIES)
def test_config_and_tensors(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]()
    reference = write(family, tmp_path)
    checkpoint = describe(reference.directory)
    model = family.reference.model
    assert checkpoint.architectures == (type(model).__name__,)
    assert checkpoint.config["model_type"] == model.config.model_type
    vision = model.config.vision_config.to_dict()
    for key, value in checkpoint.config["vision_config"].items():
        expected = vision.get(key, value)
        if isinstance(expected, list | tuple) and not isinstance(value, list):
            expected = expected[0]
        assert value == (pytest.approx(expected) if type(value) is float else expected), key
    alone = describe(reference.directory, "none")
    assert alone.digest != checkpoint.digest


def test_a_chat(tmp_path: Path) -> None:
    """The template of the file knows only text."""
    family = FAMILIES["mistral3"]()
    reference = write(family, tmp_path)
    image = random_image(30, 20, seed=5)
    content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "w7 w8"}]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory, **settings_of(tmp_path)) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    one = prompt(1, image, 7, 8, 3, mark=family.mark)
    check_output(reference, one, output.outputs[0], 1e-4)


KEY = "clip.vision"
ROW = np.ones(32, np.float32)
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "merged, without a norm": (
        "mistral3",
        {},
        {"mm.input_norm.weight": None},
        "there is a tensor mm.patch_merger.weight, but no mm.input_norm.weight",
    ),
    "merged, without its tensor": (
        "pixtral",
        {f"{KEY}.spatial_merge_size": 2},
        {},
        "spatial_merge_size is 2, but there is no tensor mm.patch_merger.weight",
    ),
    "merged by another number": (
        "mistral3",
        {f"{KEY}.spatial_merge_size": 3},
        {},
        r"is 3, and mm.patch_merger.weight has shape \(32, 128\); expected \(32, 288\)",
    ),
    "no end of lines": (
        "pixtral",
        {},
        {"v.token_embd.img_break": None},
        "v.token_embd.img_break has shape None",
    ),
    "positions": (
        "pixtral",
        {},
        {"v.position_embd.weight": np.ones((16, 32), np.float32)},
        "'v.position_embd.weight' has no place in a model with the projector 'pixtral'",
    ),
    "activations": ("pixtral", {"clip.use_gelu": True, "clip.use_silu": True}, {}, "both clip.use"),
    "no base": ("pixtral", {"clip.rope.freq_base": 0.0}, {}, "rope.freq_base is 0.0, expected a p"),
    "blocks of rows": (
        "internvl",
        {f"{KEY}.projector.scale_factor": 3},
        {},
        "scale_factor is 3, expected a divisor of 4 patches a side",
    ),
    "tiles": (
        "internvl",
        {f"{KEY}.preproc_min_tiles": 4},
        {},
        "preproc_min_tiles is 4, expected at most preproc_max_tiles, 3",
    ),
    "other positions": (
        "internvl",
        {},
        {"v.position_embd.weight": np.ones((16, 32), np.float32)},
        r"position_embd.weight has shape \(16, 32\); the metadata says \(1, 17, 32\)",
    ),
    "a last norm": ("internvl", {}, {"v.post_ln.weight": ROW}, "'v.post_ln.weight' has no place"),
    "pixels": ("pixtral", {f"{KEY}.image_max_pixels": 9}, {}, "image_max_pixels is not supported"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_files_that_are_refused(
    tmp_path: Path, case: tuple[str, dict[str, Any], dict[str, Any], str]
) -> None:
    name, metadata, tensors, message = case
    reference = write(FAMILIES[name](), tmp_path, metadata=metadata, tensors=tensors)
    with pytest.raises(ModelError, match=message):
        describe(reference.directory)


WORDS = {"pixtral": BREAKS, "internvl": CONTEXT}


@pytest.mark.parametrize("name", WORDS)
def test_vocabularies_without_a_token(tmp_path: Path, name: str) -> None:
    for missing in WORDS[name]:
        family = FAMILIES[name]()
        family.special = [text for text in family.special if text != missing]
        reference = write(family, tmp_path)
        with pytest.raises(ModelError, match="which prompts with images need"):
            describe(reference.directory)


@pytest.fixture(scope="module", params=FAMILIES)
def files(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Return the file of a language model, and the metadata and tensors of the tower."""
    family = FAMILIES[request.param]()
    keys, tensors = WRITERS[family.kind](family.reference.model)
    path = write(family, tmp_path_factory.mktemp("odd")).directory
    return path, {**keys, **family.metadata}, tensors


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_odd_metadata(files: tuple[Path, Any, Any], data: Any) -> None:
    """A file has a config that the model takes, or it is an error of the model."""
    path, keys, tensors = files
    key = data.draw(st.sampled_from(sorted(keys)))
    chosen = {**keys, key: data.draw(ODD)}
    kept = {name: value for name, value in chosen.items() if value is not None}
    write_file(path.with_name("mmproj-model.gguf"), "clip", kept, tensors)
    with contextlib.suppress(ModelError):
        processor_of(describe(path))
