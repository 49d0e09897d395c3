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
from mmproj_files import round_values, text_parts, with_old_names, write_file
from mmproj_towers import WRITERS
from mmproj_towers import internvl as internvl_parts
from test_mmproj_parity import COLORS, ODD, describe, inputs_of, processor_of, settings_of
from test_qwen_vl_parity import FILM, MARK
from test_qwen_vl_parity import SPECIAL as QWEN_WORDS
from test_qwen_vl_parity import made as qwen_made
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    check_media,
    check_output,
    make_media_model,
    make_tokenizer,
    mixed_prompts,
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
QWEN_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "num_heads": 4, "depth": 3, "mlp_ratio": 3, "patch_size": PATCH},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "num_heads": 4,
        "depth": 3,
        "intermediate_size": 64,
        "patch_size": PATCH,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
}
BREAKS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]


@dataclass
class Family:
    """A model with its processor, and how its files are written. kind: of the projector. mark:
    stands for an image. special: tokens of the vocabulary from 100 on. metadata: of the tower, that
    the writer does not know. around: the tokens of the mark around those of an image."""

    kind: str
    mark: str
    special: list[str]
    reference: MediaReference
    metadata: dict[str, Any] = field(default_factory=dict)
    around: tuple[int, ...] = ()


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
    return Family("pixtral", BREAKS[0], BREAKS, reference)


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
    return Family("internvl", CONTEXT[0], CONTEXT, reference, tiles)


def qwen_vl(kind: str, **more: Any) -> Family:
    reference, _, _ = qwen_made(kind, {**QWEN_VISION[kind], **more})
    pixels = {"clip.vision.image_min_pixels": 64, "clip.vision.image_max_pixels": 1024}
    windows = {} if kind == "qwen2_vl" else {"clip.vision.window_size": 16}
    name = "qwen2vl_merger" if kind == "qwen2_vl" else "qwen2.5vl_merger"
    return Family(name, MARK, QWEN_WORDS, reference, {**pixels, **windows}, (100, 102))


FAMILIES: dict[str, Callable[[], Family]] = {
    "mistral3": lambda: pixtral("mistral3"),
    "pixtral": lambda: pixtral("llava"),
    "internvl": internvl,
    "qwen2 vl": lambda: qwen_vl("qwen2_vl"),
    "qwen2.5 vl": lambda: qwen_vl("qwen2_5_vl"),
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stored", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(tmp_path: Path, name: str, stored: str) -> None:
    family = FAMILIES[name]()
    reference = write(family, tmp_path, stored)
    check_media(reference, some_prompts(family.mark), repeats=2, **settings_of(tmp_path))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN.keys())
@pytest.mark.parametrize("name", FAMILIES)
def test_steps(tmp_path: Path, name: str, chosen: dict[str, Any]) -> None:
    family = FAMILIES[name]()
    reference = write(family, tmp_path, "Q8_0")
    check_media(reference, some_prompts(family.mark), **settings_of(tmp_path, **chosen))


@pytest.mark.sampled(2)
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
    "qwen2.5 vl without windows": (
        lambda: qwen_vl("qwen2_5_vl", fullatt_block_indexes=[0, 1, 2]),
        {"clip.vision.n_wa_pattern": 0},
    ),
    "qwen2.5 vl with a list of layers": (
        lambda: qwen_vl("qwen2_5_vl", fullatt_block_indexes=[0]),
        {"clip.vision.n_wa_pattern": None, "clip.vision.fullatt_block_indexes": [0]},
    ),
    "qwen2 vl of GELU": (lambda: qwen_vl("qwen2_vl", hidden_act="gelu"), {"clip.use_gelu": True}),
}


@pytest.mark.sampled(2)
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


def test_older_qwen_files(tmp_path: Path) -> None:
    """The oldest files swap the layers of blocks, have an empty tensor of positions, and do not say
    how wide blocks are."""
    family = qwen_vl("qwen2_vl")
    _, tensors = WRITERS[family.kind](family.reference.model)
    swapped: dict[str, np.ndarray | None] = {**with_old_names(tensors)}
    swapped["v.position_embd.weight"] = np.zeros((10, 10), np.float32)
    names = {"clip.has_qwen2vl_merger": True, "clip.vision.feed_forward_length": 0}
    reference = write(family, tmp_path, "F16", metadata=names, tensors=swapped)
    check_media(reference, some_prompts(family.mark), **settings_of(tmp_path))


def test_queries_keys_and_values_as_one(tmp_path: Path) -> None:
    family = qwen_vl("qwen2_5_vl")
    _, tensors = WRITERS[family.kind](family.reference.model)
    changed: dict[str, np.ndarray | None] = {}
    for name in tensors:
        if ".attn_q." in name:
            names = [name.replace(".attn_q.", f".attn_{part}.") for part in "qkv"]
            changed |= dict.fromkeys(names)
            whole = np.concatenate([tensors[each] for each in names])
            changed[name.replace(".attn_q.", ".attn_qkv.")] = whole
    reference = write(family, tmp_path, "Q8_0", tensors=changed)
    check_media(reference, some_prompts(family.mark), **settings_of(tmp_path))
    write(family, tmp_path, tensors={**changed, **tensors})
    with pytest.raises(ModelError, match=r"has both 'visual.blocks.0.attn.qkv.weight' and its pa"):
        describe(reference.directory)
    write(family, tmp_path, tensors={"v.blk.1.attn_k.bias": None})
    with pytest.raises(ModelError, match=r"has no 'visual.blocks.1.attn.k.bias', which is joined"):
        describe(reference.directory)


@pytest.mark.parametrize("name", ["qwen2 vl", "qwen2.5 vl"])
def test_videos(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]()
    reference = write(family, tmp_path)
    limits = {"mm_processor_kwargs": {"min_pixels": 64, "max_pixels": 1024}}
    prompts = [{**one, **limits} for one in mixed_prompts(MARK, FILM) if "multi_modal_data" in one]
    check_media(reference, prompts, num_tokens=3, **settings_of(tmp_path))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_language_model_alone(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]()
    reference = write(family, tmp_path)
    chosen = settings_of(tmp_path)
    chosen["plugin_options"] = {
        **chosen["plugin_options"],
        "weight_loader.gguf": {"mmproj": "none"},
    }
    check_media(reference, [some_prompts()[1]], **chosen)


@pytest.mark.parametrize(("tower", "language"), [("internvl", "qwen2 vl"), ("qwen2 vl", "pixtral")])
def test_towers_of_other_models(tmp_path: Path, tower: str, language: str) -> None:
    reference = write(FAMILIES[language](), tmp_path)
    family = FAMILIES[tower]()
    keys, tensors = WRITERS[family.kind](family.reference.model)
    write_file(tmp_path / "mmproj-model.gguf", "clip", keys, tensors)
    with pytest.raises(ModelError, match="language model beside it has .*positions on three axes"):
        describe(reference.directory)


@pytest.mark.parametrize("sections", [[4, 2, 2, 1], [4, 4], 8, [4, -1, 1, 0]])
def test_axes_that_are_refused(tmp_path: Path, sections: Any) -> None:
    family = qwen_vl("qwen2_vl")
    path = write(family, tmp_path).directory
    arch, text, values = text_parts(family.reference.model, family.special)
    write_file(path, arch, {**text, "qwen2vl.rope.dimension_sections": sections}, values)
    with pytest.raises(ModelError, match="expected the numbers of pairs of channels of three axes"):
        describe(path)


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
    expected = family.reference.inputs(prompt(1, image, 2, mark=family.mark))
    processed = ours.process("image", image, {})
    pixels = expected["pixel_values"].numpy()
    shape = processed.arrays["pixel_values"].shape
    np.testing.assert_array_equal(processed.arrays["pixel_values"], pixels.reshape(shape))
    first, last = family.around[:1], family.around[1:]
    assert expected["input_ids"][0].tolist() == [1, *first, *processed.token_ids, *last, 2]


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
    "norms": (
        "qwen2 vl",
        {f"{KEY}.attention.layer_norm_epsilon": 1e-5},
        {},
        "layer_norm_epsilon is 1e-05, expected 1e-06",
    ),
    "no windows": ("qwen2.5 vl", {f"{KEY}.n_wa_pattern": None}, {}, "n_wa_pattern is missing"),
    "windows": (
        "qwen2.5 vl",
        {f"{KEY}.fullatt_block_indexes": [3]},
        {},
        r"fullatt_block_indexes is \[3\], expected numbers from 0 to 2",
    ),
    "many layers": ("qwen2.5 vl", {f"{KEY}.block_count": 2**31 - 1}, {}, "has 3 layers; its meta"),
    "no gate": ("qwen2.5 vl", {"clip.use_glu_mlp": False}, {}, "clip.use_glu_mlp is False"),
    "no merger": ("qwen2 vl", {"clip.has_qwen2vl_merger": False}, {}, "qwen2vl_merger is False"),
    "fewest pixels": (
        "qwen2 vl",
        {f"{KEY}.image_min_pixels": 4096},
        {},
        "image_min_pixels is 4096, expected at most image_max_pixels, 1024",
    ),
    "blocks of another width": (
        "qwen2 vl",
        {},
        {"v.blk.0.ffn_up.weight": np.ones((33, 32), np.float32)},
        r"v.blk.0.ffn_up.weight has shape \(33, 32\); expected a multiple of 32 rows of 32",
    ),
    "one frame": ("qwen2 vl", {}, {"v.patch_embd.weight.1": None}, "weight.1 has shape None"),
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


WORDS = {"pixtral": BREAKS, "internvl": CONTEXT, "qwen2.5 vl": QWEN_WORDS}


@pytest.mark.parametrize("name", WORDS)
def test_vocabularies_without_a_token(tmp_path: Path, name: str) -> None:
    for missing in WORDS[name]:
        family = FAMILIES[name]()
        family.special = [text for text in family.special if text != missing]
        reference = write(family, tmp_path)
        with pytest.raises(ModelError, match="which prompts with images or audio"):
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
