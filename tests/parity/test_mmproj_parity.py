"""Models of images in two GGUF files, compared with transformers: configs, processors and
logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmproj_files import (
    round_values,
    text_parts,
    tower_parts,
    with_old_names,
    without_last_layers,
    write_file,
)
from pegboard_pack_gguf.loader import GGUFLoader
from pegboard_pack_gguf.options import GGUFFiles
from pegboard_pack_gguf.tokenizer import GGUFTokenizer
from test_bidirectional_parity import MARKS, SIZE, TEXT, TypedReference
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    Prompt,
    add_adapter,
    check_media,
    check_output,
    make_media_model,
    make_tokenizer,
    open_media_llm,
    prompt,
    some_prompts,
)
from tiny_models import VOCAB_SIZE, divide
from transformers import Idefics3ImageProcessorPil, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from pegboard import SamplingParams
from pegboard.data.request import LoRARequest
from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard.interfaces.tokenizer import TokenizerSetup
from pegboard.interfaces.weight_loader import Checkpoint, WeightLoaderSetup
from pegboard.plugins.importing import import_object, import_spec
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.media_peers import idefics3_processor

SIDE = 16
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 4,
}
COLORS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
PLACES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
TILES = ["<image>", "<fake_token_around_image>", "<global-img>", *PLACES, "\n", "\n\n"]


@dataclass
class Family:
    """A model with its processor, and how its files are written. kind: of the projector. mark:
    stands for an image. special: tokens of the vocabulary from 100 on. more: metadata of the
    tower."""

    kind: str
    mark: str
    special: list[str]
    reference: MediaReference
    processor: Any
    more: dict[str, Any]


def family_of(kind: str) -> Family:
    return FAMILIES[kind]()


def inputs_of(processor: Any) -> Callable[[Prompt], Mapping[str, torch.Tensor]]:
    def inputs(one: Prompt) -> Mapping[str, torch.Tensor]:
        images = one.get("multi_modal_data", {}).get("image")
        return dict(processor(text=one["prompt"], images=images, return_tensors="pt"))

    return inputs


def llava(**config: Any) -> Family:
    values = {
        "text_config": {"model_type": "llama", **MEDIA_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **VISION},
        "image_token_id": 100,
        **config,
    }
    model = make_media_model("llava", **values)
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=make_tokenizer(["<image>"], "<image>"),
        patch_size=VISION["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    reference = MediaReference(Path(), model, inputs_of(processor))
    return Family("mlp", "<image>", ["<image>"], reference, processor, {})


def smolvlm() -> Family:
    model = make_media_model(
        "idefics3",
        text_config={"model_type": "llama", **MEDIA_TEXT},
        vision_config={"model_type": "idefics3_vision", **VISION},
        image_token_id=100,
        tie_word_embeddings=False,
        scale_factor=2,
    )
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}, **COLORS
    )
    processor = idefics3_processor(
        images, make_tokenizer([*TILES, "<end_of_utterance>"], "<image>"), rows=4
    )
    more = {
        "clip.vision.projector.scale_factor": 2,
        "clip.vision.preproc_image_size": 2 * SIDE,
    }
    reference = MediaReference(Path(), model, inputs_of(processor))
    return Family("idefics3", "<image>", TILES, reference, processor, more)


def gemma3() -> Family:
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    text = {**TEXT, "num_hidden_layers": 6, "layer_types": layers}
    model = make_media_model(
        "gemma3",
        text_config={"model_type": "gemma3_text", **text},
        vision_config={"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=100,
        image_token_index=101,
        eoi_token_index=102,
    )
    tokenizer = make_tokenizer(MARKS, MARKS[0])
    names = {"boi_token": MARKS[0], "image_token": MARKS[1], "eoi_token": MARKS[2]}
    tokenizer._set_model_specific_special_tokens(names)
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size=SIZE, **COLORS),
        tokenizer=tokenizer,
        image_seq_length=4,
    )
    more = {"clip.vision.projector.scale_factor": 2}
    reference = TypedReference(Path(), model, inputs_of(processor))
    return Family("gemma3", MARKS[0], MARKS, reference, processor, more)


FAMILIES: dict[str, Callable[[], Family]] = {
    "mlp": llava,
    "idefics3": smolvlm,
    "gemma3": gemma3,
}


def write(
    family: Family,
    folder: Path,
    stored: str = "F32",
    *,
    is_old: bool = False,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    count: int | None = None,
) -> MediaReference:
    """Write both files, and return the reference with the first one. metadata, tensors: of the
    tower, beyond those of the model; None leaves one out. count: of the layers of a LLaVA."""
    model = family.reference.model
    round_values(model, stored)
    arch, text, values = text_parts(model, family.special)
    path = folder / "model.gguf"
    write_file(path, arch, text, values, stored)
    keys, parts = tower_parts(model, family.kind)
    if family.kind == "mlp":
        keys, parts = without_last_layers(keys, parts, count or VISION["num_hidden_layers"] - 1)
    parts = with_old_names(parts) if is_old else parts
    changed = {**parts, **(tensors or {})}
    written = {name: value for name, value in changed.items() if value is not None}
    chosen = {**keys, **family.more, **(metadata or {})}
    kept = {key: value for key, value in chosen.items() if value is not None}
    write_file(folder / "mmproj-model.gguf", "clip", kept, written, stored)
    return replace(family.reference, directory=path)


def settings_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "kv_cache_dtype": "float32",
        "plugin_options": {"quantization.gguf": {"compute": "float"}},
        "download_dir": str(folder / "cache"),
        **more,
    }


def describe(path: Path, mmproj: str = "auto") -> Checkpoint:
    loader = GGUFLoader(GGUFFiles(mmproj=mmproj), WeightLoaderSetup())
    return loader.describe(LocalFiles(path))


CHOSEN: dict[str, dict[str, Any]] = {
    "chunks": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("kind", ["mlp", "idefics3", "gemma3"])
def test_logits(tmp_path: Path, kind: str, stored: str) -> None:
    family = family_of(kind)
    reference = write(family, tmp_path, stored)
    check_media(reference, some_prompts(family.mark), repeats=2, **settings_of(tmp_path))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN.keys())
@pytest.mark.parametrize("kind", ["mlp", "idefics3", "gemma3"])
def test_steps(tmp_path: Path, kind: str, chosen: dict[str, Any]) -> None:
    family = family_of(kind)
    reference = write(family, tmp_path, "Q8_0")
    check_media(reference, some_prompts(family.mark), **settings_of(tmp_path, **chosen))


@pytest.mark.parametrize("kind", ["mlp", "idefics3", "gemma3"])
def test_packed_weights(tmp_path: Path, kind: str) -> None:
    """Products with the integers of the file round activations, so logits are close."""
    family = family_of(kind)
    reference = write(family, tmp_path, "Q8_0")
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, ignore_eos=True)
    chosen = settings_of(tmp_path, plugin_options={})
    with open_media_llm(reference.directory, **chosen) as llm:
        outputs = llm.generate(some_prompts(family.mark), params, use_tqdm=False)
    for one, output in zip(some_prompts(family.mark), outputs, strict=True):
        (row,) = output.outputs[0].logprobs or []
        values = torch.tensor([row[token].logprob for token in range(VOCAB_SIZE)])
        expected = reference.logprobs(one, output.outputs[0].token_ids)[0]
        assert (values - expected).abs().max() < 0.5


@pytest.mark.parametrize("kind", ["mlp", "gemma3"])
def test_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    divide(monkeypatch, 2, 2)
    family = family_of(kind)
    reference = write(family, tmp_path)
    check_media(reference, some_prompts(family.mark), **settings_of(tmp_path))


def test_older_files(tmp_path: Path) -> None:
    """The oldest files name no kind of projector, and swap the layers of blocks."""
    family = llava()
    names = {"clip.projector_type": None, "clip.has_llava_projector": True}
    reference = write(family, tmp_path, "F16", is_old=True, metadata=names)
    check_media(reference, some_prompts(), **settings_of(tmp_path))


@pytest.mark.parametrize(("layers", "count"), [([3], 3), ([1, 2], 2), ([1], 2)])
def test_layers_that_are_named(tmp_path: Path, layers: list[int], count: int) -> None:
    asked = layers[0] if len(layers) == 1 else layers
    family = llava(vision_feature_layer=asked)
    names = {"clip.vision.feature_layer": layers}
    reference = write(family, tmp_path, count=count, metadata=names)
    check_media(reference, some_prompts(), **settings_of(tmp_path))


def processor_of(checkpoint: Checkpoint) -> Any:
    entry = installed_entry("multimodal_processor", checkpoint.architectures[0])
    tokenizer = GGUFTokenizer(None, TokenizerSetup(checkpoint))
    kind = import_object(import_spec(entry).implementation)
    return kind(None, MultiModalProcessorSetup(checkpoint=checkpoint, tokenizer=tokenizer))


@pytest.fixture(scope="module", params=["mlp", "idefics3", "gemma3"])
def processors(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Any]:
    family = family_of(request.param)
    reference = write(family, tmp_path_factory.mktemp("files"))
    return family, processor_of(describe(reference.directory))


@given(width=st.integers(2, 90), height=st.integers(2, 90), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_images(processors: tuple[Family, Any], width: int, height: int, seed: int) -> None:
    """Pixels and tokens, without any other file."""
    family, ours = processors
    if max(width, height) > 20 * min(width, height):
        return
    image = random_image(width, height, seed)
    expected = family.processor(text=f"w1 {family.mark} w2", images=image, return_tensors="np")
    processed = ours.process("image", image, {})
    pixels = expected["pixel_values"]
    shape = processed.arrays["pixel_values"].shape
    np.testing.assert_array_equal(processed.arrays["pixel_values"], pixels.reshape(shape))
    assert [1, *processed.token_ids, 2] == expected["input_ids"][0].tolist()


@pytest.mark.parametrize("kind", ["mlp", "idefics3", "gemma3"])
def test_config_and_tensors(tmp_path: Path, kind: str) -> None:
    family = family_of(kind)
    reference = write(family, tmp_path)
    checkpoint = describe(reference.directory)
    model = family.reference.model
    assert checkpoint.architectures == (type(model).__name__,)
    assert checkpoint.config["model_type"] == model.config.model_type
    vision = model.config.vision_config.to_dict()
    given = checkpoint.config["vision_config"]
    layers = VISION["num_hidden_layers"] - (kind == "mlp")
    expected = {name: vision[name] for name in given} | {
        "num_hidden_layers": layers,
        "layer_norm_eps": pytest.approx(vision["layer_norm_eps"]),
    }
    assert given == expected
    alone = describe(reference.directory, "none")
    assert alone.config == checkpoint.config["text_config"]
    assert alone.digest != checkpoint.digest
    named = describe(reference.directory, "mmproj-model.gguf")
    assert (named.digest, named.tensors) == (checkpoint.digest, checkpoint.tensors)


def test_the_language_model_alone(tmp_path: Path) -> None:
    family = llava()
    reference = write(family, tmp_path)
    chosen = settings_of(tmp_path)
    chosen["plugin_options"] = {
        **chosen["plugin_options"],
        "weight_loader.gguf": {"mmproj": "none"},
    }
    check_media(reference, [some_prompts()[1]], **chosen)


def test_an_adapter(tmp_path: Path) -> None:
    """Its rows get the order of the file's."""
    reference = write(llava(), tmp_path)
    folder = add_adapter(reference.model, tmp_path, "language_model.model")
    prompts = some_prompts()
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    adapter = LoRARequest("adapter", 1, str(folder))
    chosen = settings_of(tmp_path, max_loras=1, max_lora_rank=8)
    with open_media_llm(reference.directory, **chosen) as llm:
        outputs = llm.generate(prompts, params, lora_request=adapter, use_tqdm=False)
    for one, output in zip(prompts, outputs, strict=True):
        check_output(reference, one, output.outputs[0], 1e-4)


def test_a_chat(tmp_path: Path) -> None:
    """The template of the file knows only text."""
    reference = write(llava(), tmp_path)
    image = random_image(30, 20, seed=5)
    content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "w7 w8"}]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory, **settings_of(tmp_path)) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    check_output(reference, prompt(1, image, 7, 8, 3), output.outputs[0], 1e-4)


KEY = "clip.vision"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown projector": (
        "mlp",
        {"clip.projector_type": "ldpv2"},
        "'ldpv2'; supported are mlp, idefics3, gemma3",
    ),
    "no projector": ("mlp", {"clip.projector_type": None}, "projector_type None; supported"),
    "no sizes": ("mlp", {f"{KEY}.block_count": None}, "block_count is missing"),
    "no patches": ("mlp", {f"{KEY}.patch_size": 5}, "is 16, expected a multiple of patch_size 5"),
    "text": ("mlp", {f"{KEY}.image_size": "large"}, "is 'large', expected a number"),
    "colors": ("mlp", {f"{KEY}.image_mean": [0.5]}, "a number for red, green and blue"),
    "no color": ("gemma3", {f"{KEY}.image_std": [0.5, 0.0, 0.5]}, "a number for red"),
    "activations": ("mlp", {"clip.use_gelu": True, "clip.use_silu": True}, "both clip.use_gelu"),
    "no flag": ("mlp", {"clip.use_silu": 3}, "is 3, expected true or false"),
    "sound": ("mlp", {"clip.has_audio_encoder": True}, "has_audio_encoder True; expected False"),
    "no tower": ("mlp", {"clip.has_vision_encoder": False}, "False; expected True"),
    "tiles": ("mlp", {f"{KEY}.image_grid_pinpoints": [16, 32]}, "image_grid_pinpoints is not"),
    "layers": ("mlp", {f"{KEY}.feature_layer": [9]}, r"is \[9\], expected numbers from 0 to 2"),
    "layer": ("mlp", {f"{KEY}.feature_layer": 2}, "is 2, expected numbers from 0 to 2"),
    "fewer layers": ("mlp", {f"{KEY}.block_count": 1}, "has 2 layers; its metadata .* says 1"),
    "many layers": (
        "gemma3",
        {f"{KEY}.block_count": 10**9},
        "has 3 layers; its metadata .* says 1",
    ),
    "large images": ("mlp", {f"{KEY}.image_size": 2**30}, r"position_embd.weight has shape \(17, "),
    "other patches": ("mlp", {f"{KEY}.patch_size": 8}, r"patch_embd.weight has shape \(32, 3, 4"),
    "no scale": ("idefics3", {f"{KEY}.projector.scale_factor": None}, "scale_factor is missing"),
    "scale": ("gemma3", {f"{KEY}.projector.scale_factor": 3}, "a divisor of 4 patches a side"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_metadata_that_is_refused(tmp_path: Path, case: tuple[str, dict[str, Any], str]) -> None:
    kind, metadata, message = case
    reference = write(family_of(kind), tmp_path, metadata=metadata)
    with pytest.raises(ModelError, match=message):
        describe(reference.directory)


ODD = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32),
    st.text(max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.lists(st.floats(width=32), min_size=1, max_size=4),
    st.none(),
)


@pytest.fixture(scope="module", params=["mlp", "idefics3", "gemma3"])
def parts(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Return the file of a language model, and the metadata and tensors of the tower."""
    family = family_of(request.param)
    folder = tmp_path_factory.mktemp("odd")
    keys, tensors = tower_parts(family.reference.model, family.kind)
    if family.kind == "mlp":
        keys, tensors = without_last_layers(keys, tensors, VISION["num_hidden_layers"] - 1)
    return write(family, folder).directory, {**keys, **family.more}, tensors


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_odd_metadata(parts: tuple[Path, Any, Any], data: Any) -> None:
    """A file has a config that the model takes, or it is an error of the model."""
    path, keys, tensors = parts
    key = data.draw(st.sampled_from(sorted({*keys, "clip.vision.feature_layer"})))
    chosen = {**keys, key: data.draw(ODD)}
    kept = {name: value for name, value in chosen.items() if value is not None}
    write_file(path.with_name("mmproj-model.gguf"), "clip", kept, tensors)
    with contextlib.suppress(ModelError):
        checkpoint = describe(path)
        processor_of(checkpoint)
        assert checkpoint.config["vision_config"]["image_size"] == kept["clip.vision.image_size"]


def test_vocabularies_without_the_token_of_images(tmp_path: Path) -> None:
    family = replace(smolvlm(), special=["<picture>"])
    reference = write(family, tmp_path)
    with pytest.raises(ModelError, match="has no token '<image>', which prompts with images"):
        describe(reference.directory)
    assert describe(reference.directory, "none").architectures == ("LlamaForCausalLM",)
    begin = replace(gemma3(), special=["<start_of_image>", "<end_of_image>"])
    reference = write(begin, tmp_path)
    with pytest.raises(ModelError, match="has no token '<image_soft_token>'"):
        describe(reference.directory)


STAND_INS = {
    "Llama 2": ("mlp", "<image>", "<unk>"),
    "Llama 3": ("mlp", "<image>", "<|reserved_special_token_9|>"),
    "Gemma 3": ("gemma3", "<image_soft_token>", "<unused9>"),
}


@pytest.mark.parametrize("case", STAND_INS.values(), ids=STAND_INS.keys())
def test_tokens_in_the_place_of_those_of_images(tmp_path: Path, case: tuple[str, str, str]) -> None:
    kind, usual, other = case
    family = family_of(kind)
    special = [other if text == usual else text for text in family.special]
    reference = write(replace(family, special=special), tmp_path)
    with open_media_llm(reference.directory, **settings_of(tmp_path)) as llm:
        params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
        for one in some_prompts(family.mark):
            named = {**one, "prompt": one["prompt"].replace(usual, other)}
            (output,) = llm.generate(named, params, use_tqdm=False)
            check_output(reference, one, output.outputs[0], 1e-4)


def test_towers_of_other_models(tmp_path: Path) -> None:
    reference = write(llava(), tmp_path)
    keys, parts = tower_parts(gemma3().reference.model, "gemma3")
    write_file(tmp_path / "mmproj-model.gguf", "clip", keys, parts)
    with pytest.raises(ModelError, match="tower of Gemma 3; the language model .* 'llama'"):
        describe(reference.directory)
    wide = {"mm.2.weight": np.ones((64, 32), np.float32)}
    write(llava(), tmp_path, tensors=wide)
    with pytest.raises(ModelError, match=r"\(64, 32\); the language model has vectors of 32"):
        describe(reference.directory)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"v.post_ln.weight": np.ones(32, np.float32)}, "'v.post_ln.weight' has no place"),
        ({"model.image_newline": np.ones(32, np.float32)}, "'model.image_newline' has no place"),
        ({"v.blk.0.attn_qkv.weight": np.ones((96, 32), np.float32)}, "attn_qkv.* has no place"),
        ({"mm.2.weight": None}, "mm.2.weight has shape None"),
        ({"v.patch_embd.weight": None}, "v.patch_embd.weight has shape None; the metadata says"),
        ({"v.position_embd.weight": np.ones((16, 32), np.float32)}, r"shape \(16, 32\); .* \(17"),
    ],
)
def test_tensors_without_a_place(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    reference = write(llava(), tmp_path, tensors=tensors)
    with pytest.raises(ModelError, match=message):
        describe(reference.directory)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"v.blk.0.ln1.bias": None}, "lacks 1 tensors .*layers.0.layer_norm1.bias"),
        ({"v.class_embd": None}, "class_embedding"),
        ({"v.blk.1.attn_q.weight": np.ones((32, 31), np.float32)}, "q_proj.weight.*31"),
        ({"mm.0.weight": np.ones((32, 64), np.float32)}, "linear_1.weight.*64"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    reference = write(llava(), tmp_path, tensors=tensors)
    with pytest.raises(ModelError, match=message):
        open_media_llm(reference.directory, **settings_of(tmp_path))


def test_files_that_are_refused(tmp_path: Path) -> None:
    reference = write(llava(), tmp_path)
    path = tmp_path / "mmproj-model.gguf"
    whole = path.read_bytes()
    for size in (0, 3, 20, 500, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            describe(reference.directory)
    path.write_bytes(reference.directory.read_bytes())
    with pytest.raises(ModelError, match="is no tower for images or audio: .* is 'llama'"):
        describe(reference.directory)
    path.write_bytes(whole)
    (tmp_path / "mmproj-other.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match="mmproj-model.gguf, mmproj-other.gguf; name one"):
        describe(reference.directory)
    assert describe(reference.directory, "mmproj-other.gguf").architectures[0].startswith("Llava")
    with pytest.raises(ModelError, match=r"there is no file .*gone.gguf"):
        describe(reference.directory, "gone.gguf")
