"""DeepSeek-VL2: the rows of transformers' SigLIP with the published projector and order of rows,
its logits with images, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_deepseek_vl.deepseek_vl2 import DeepseekVL2
from pegboard_model_deepseek_vl.processor import DeepseekVL2Processor
from safetensors.torch import load_file
from tiny_deepseek import (
    HIDDEN,
    IMAGE,
    MARK,
    PUBLISHED,
    RowsReference,
    check_odd_values,
    language_config,
    randomize,
    write_published,
)
from tiny_deepseek import language_model as their_language
from tiny_media import (
    MediaParity,
    built_model,
    check_media,
    language_model,
    open_media_llm,
    prompt,
    some_prompts,
)
from torch import Tensor, nn
from torch.nn import functional
from transformers import SiglipVisionConfig, SiglipVisionModel

from pegboard.errors import ModelError
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build
from pegboard_testing.media_peers import image_setup

SIDE = 18
PATCH = 4
GRID = 4
WIDTH = 24
VALUES = {
    "candidate_resolutions": [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [SIDE, 3 * SIDE]],
    "downsample_ratio": 3,
    "patch_size": PATCH,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "image_token": MARK,
    "normalize": True,
    "processor_class": "DeepseekVLV2Processor",
    "sft_format": "deepseek",
}
"""The grid of 4 patches is no multiple of 3, so blocks go over the edge."""
PROJECTORS: dict[str, dict[str, Any]] = {
    "blocks": {"downsample_ratio": 3, "mlp_ratio": 2, "depth": 3},
    "default depth": {"downsample_ratio": 3, "projector_type": "downsample_mlp_gelu"},
    "linear": {"projector_type": "linear"},
}


def config_of(language: str = "ordinary attention", projector: str = "blocks", **more: Any) -> Any:
    return {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": VALUES["candidate_resolutions"],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": language_config(language),
        "projector_config": {
            "model_type": "mlp_projector",
            "input_dim": WIDTH,
            "n_embed": HIDDEN,
            **PROJECTORS[projector],
        },
        "torch_dtype": "float32",
        "vision_config": {
            "model_type": "vision",
            "model_name": "siglip_so400m_patch14_384",
            "image_size": SIDE,
            "patch_size": PATCH,
            "width": WIDTH,
            "layers": 2,
            "heads": 3,
            "mlp_ratio": 1.7,
        },
        **more,
    }


def make_tower() -> Any:
    values = {"num_hidden_layers": 2, "num_attention_heads": 3, "vision_use_head": False}
    config = SiglipVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=int(1.7 * WIDTH),
        image_size=SIDE,
        patch_size=PATCH,
        attn_implementation="eager",
        **values,
    )
    tower = SiglipVisionModel(config).eval()
    randomize(tower)
    return tower


NAMES = {
    r"^vision_model\.": "",
    r"^embeddings\.patch_embedding": "patch_embed.proj",
    r"^embeddings\.position_embedding\.weight": "pos_embed",
    r"^encoder\.layers": "blocks",
    r"layer_norm(\d)": r"norm\1",
    r"self_attn\.out_proj": "attn.proj",
    r"^post_layernorm": "norm",
}


def published(tower: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the tower with their published names, those of timm."""
    renamed = {}
    for name, tensor in tower.items():
        if ".k_proj" in name or ".v_proj" in name:
            continue
        if ".q_proj" in name:
            parts = [tower[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            name, tensor = name.replace("self_attn.q_proj", "attn.qkv"), torch.cat(parts)
        for pattern, new in NAMES.items():
            name = re.sub(pattern, new, name)
        renamed[f"vision.{name}"] = tensor[None] if name == "pos_embed" else tensor
    return renamed


def make_projector(name: str) -> nn.Module:
    """Return the layers as the published code has them."""
    if name == "linear":
        return nn.Linear(WIDTH, HIDDEN)
    inner = PROJECTORS[name].get("mlp_ratio", 1) * HIDDEN
    layers: list[nn.Module] = [nn.Linear(9 * WIDTH, inner)]
    for _ in range(PROJECTORS[name].get("depth", 2) - 2):
        layers += [nn.GELU(), nn.Linear(inner, inner)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(inner, HIDDEN))


class Rows:
    """What the published code makes of the views of an image."""

    def __init__(self, projector: str, place: str) -> None:
        torch.manual_seed(3)
        self.place = place
        self.tower = make_tower()
        self.is_linear = projector == "linear"
        self.layers = make_projector(projector)
        randomize(self.layers)
        self.newline = torch.randn(HIDDEN)
        self.separator = torch.randn(HIDDEN)

    def tensors(self) -> dict[str, Tensor]:
        layers = {f"projector.layers.{name}": v for name, v in self.layers.state_dict().items()}
        ends = {"image_newline": self.newline, "view_seperator": self.separator}
        return {**published(self.tower.state_dict()), **layers, **ends}

    def __call__(self, pixels: Tensor, tiles: tuple[int, int]) -> Tensor:
        """[1 + tiles, 3, size, size] → [rows, width]. tiles: below and beside each other."""
        with torch.no_grad():
            features = self.tower(pixels).last_hidden_state
            if not self.is_linear:
                plane = features.transpose(1, 2).unflatten(2, (GRID, GRID))
                whole = functional.pad(plane, (0, 2, 0, 2))
                features = functional.unfold(whole, 3, stride=3).transpose(1, 2)
            views = self.layers(features)
        side = round(views.shape[1] ** 0.5)
        first, *rest = (view.view(side, side, -1) for view in views)
        below, beside = tiles
        lines = [torch.cat(rest[i * beside : (i + 1) * beside], 1) for i in range(below)]
        parts = []
        for plane in (first, torch.cat(lines)):
            ends = self.newline.expand(len(plane), 1, -1)
            parts.append(torch.cat([plane, ends], 1).flatten(0, 1))
        parts = parts if self.place == "head" else parts[::-1]
        return torch.cat([parts[0], self.separator[None], parts[1]])


def write(
    folder: Path,
    language: str = "ordinary attention",
    projector: str = "blocks",
    place: str = "head",
) -> RowsReference:
    config = config_of(language, projector, global_view_pos=place)
    rows = Rows(projector, place)
    model = their_language(language)
    write_published(folder, model, "language.", rows.tensors(), config, VALUES)
    processor = DeepseekVL2Processor(None, image_setup(folder, config, [MARK]))

    def rows_of(image: Any) -> Tensor:
        arrays = processor.process("image", image, {}).arrays
        below, beside = arrays["tiles"].tolist()
        return rows(torch.from_numpy(arrays["pixel_values"]), (below, beside))

    def inputs(one: Any) -> Any:
        return {}

    reference = RowsReference(folder, model, inputs, rows_of)
    reference.views = rows  # type: ignore[attr-defined]
    return reference


FORMS = [("blocks", "head"), ("default depth", "tail"), ("linear", "head")]


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def form(request: Any, tmp_path_factory: pytest.TempPathFactory) -> RowsReference:
    projector, place = request.param
    return write(tmp_path_factory.mktemp("form"), projector=projector, place=place)


shapes = st.lists(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1)]), min_size=1, max_size=3)


@given(shapes)
@settings(max_examples=10, deadline=None)
def test_rows(form: Any, shapes: list[tuple[int, int]]) -> None:
    """Of items with different numbers of tiles."""
    ours, _ = built_model(DeepseekVL2, form.directory)
    pixels = [torch.randn(1 + below * beside, 3, SIDE, SIDE) for below, beside in shapes]
    items = [
        {"pixel_values": each, "tiles": torch.tensor(shape)}
        for each, shape in zip(pixels, shapes, strict=True)
    ]
    for each, shape, rows in zip(pixels, shapes, ours.encode("image", items), strict=True):
        torch.testing.assert_close(rows, form.views(each, shape), atol=1e-4, rtol=1e-4)


def test_the_tensors_that_are_read(form: Any) -> None:
    _, used = built_model(DeepseekVL2, form.directory)
    assert used == load_file(form.directory / "model.safetensors").keys()
    _, later = built_model(DeepseekVL2, form.directory, layers=range(1, 2))
    assert all(name.startswith("language.") for name in later)


def test_logits_of_other_forms(form: Any) -> None:
    check_media(form, some_prompts(MARK), num_tokens=2)


@pytest.fixture(scope="module", params=PUBLISHED)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> RowsReference:
    return write(tmp_path_factory.mktemp("language"), request.param)


class TestParity(MediaParity):
    prompts = staticmethod(lambda: some_prompts(MARK))


def test_an_image_in_one_tile(tmp_path: Path) -> None:
    """The whole image, and the same as a tile: 6 rows, the separator, 6 rows. As in the published
    config, no architecture is named."""
    write(tmp_path)
    config = {name: value for name, value in config_of().items() if name != "architectures"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = prompt(4, random_image(40, 20), 5, mark=MARK)
    with open_media_llm(tmp_path) as llm:
        (cut,) = llm.generate([one], use_tqdm=False)
        (whole,) = llm.generate([{**one, "mm_processor_kwargs": {"cropping": False}}])
        images = [random_image(40, 20, seed) for seed in range(3)]
        (many,) = llm.generate([prompt(*images, mark=MARK)], use_tqdm=False)
    assert many.prompt_token_ids.count(IMAGE) == 3 * 13
    assert [output.prompt_token_ids.count(IMAGE) for output in (cut, whole)] == [6 + 1 + 10, 13]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("", {"tile_tag": "1D"}, "tile_tag='1D'; only '2D' is supported"),
    ("", {"global_view_pos": "middle"}, "global_view_pos='middle'; expected head or tail"),
    ("", {"vision_config": 3}, "vision_config=3; expected an object"),
    ("", {"language_config": None}, "language_config=None; expected an object with a model_type"),
    ("vision_config", {"class_token": True}, "class_token=True; only False is supported"),
    ("vision_config", {"ignore_head": False}, "ignore_head=False; only True is supported"),
    ("vision_config", {"global_pool": "avg"}, "global_pool='avg'; only 'map' is supported"),
    ("vision_config", {"heads": 5}, "hidden_size=24, which is not a multiple of"),
    ("vision_config", {"width": {"clip": 3}}, "has width={'clip': 3}; expected a whole number"),
    ("vision_config", {"image_size": 3}, "image_size=3; expected at least a patch of 4 pixels"),
    ("vision_config", {"mlp_ratio": 0}, "mlp_ratio=0; expected a positive number"),
    ("projector_config", {"projector_type": "identity"}, "='identity'; expected downsample_mlp_ge"),
    ("projector_config", {"token_pooling": True}, "token_pooling=True; only False is supported"),
    ("projector_config", {"input_dim": 8}, "input_dim=8; the features of its vision tower have 24"),
    ("projector_config", {"n_embed": 8}, "n_embed=8; its language model has hidden_size=32"),
    ("projector_config", {"depth": 0}, "depth=0; expected a whole number from 1 on"),
    ("language_config", {"model_type": "llama"}, "expected an object with a model_type of deepsee"),
    ("language_config", {"use_mla": "no"}, "use_mla='no'; expected true or false"),
    ("language_config", {"rm_head": True}, "rm_head=True; expected False"),
    ("language_config", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' and n_group=1 with"),
    ("language_config", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
]


@pytest.mark.parametrize(("place", "values", "message"), REFUSED)
def test_configs_that_are_refused(place: str, values: dict[str, Any], message: str) -> None:
    config = config_of()
    if not place:
        config |= values
    else:
        config[place] = {**config[place], **values}
    with pytest.raises(ModelError, match=re.escape(message)):
        DeepseekVL2(config, fake_build(models=language_model))


def test_odd_values() -> None:
    check_odd_values(DeepseekVL2, config_of(), ["language.model.layers.0.x"])
