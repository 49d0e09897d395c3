"""DeepSeek-OCR: the rows of transformers' SAM and CLIP with the published projector and order of
rows, its logits with images, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_deepseek_vl import sam
from pegboard_model_deepseek_vl.deepseek_ocr import DeepseekOCR
from pegboard_model_deepseek_vl.ocr_processor import DeepseekOCRProcessor
from safetensors.torch import load_file
from tiny_deepseek import (
    HIDDEN,
    IMAGE,
    MARK,
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
    language_model,
    open_media_llm,
    prompt,
    some_prompts,
)
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel, SamVisionConfig
from transformers.models.sam.modeling_sam import SamVisionEncoder

from pegboard.errors import ModelError
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build
from pegboard_testing.media_peers import image_setup

BASE = 256
SIDE = 32
WIDTH = 16
CHANNELS = [6, 24]
"""Of the two convolutions after SAM; the last ones are those of CLIP."""
CLIP = {"width": 24, "layers": 2, "heads": 3, "image_size": 42, "patch_size": 14}
SAM = {
    "width": WIDTH,
    "layers": 3,
    "heads": 2,
    "global_attn_indexes": [1],
    "downsample_channels": CHANNELS,
}
VALUES = {
    "candidate_resolutions": [[1024, 1024]],
    "image_size": SIDE,
    "downsample_ratio": 4,
    "patch_size": 16,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "image_token": MARK,
    "normalize": True,
}


def config_of(**more: Any) -> dict[str, Any]:
    language = language_config("ordinary attention")
    return {
        **language,
        "architectures": ["DeepseekOCRForCausalLM"],
        "auto_map": {"AutoModel": "modeling_deepseekocr.DeepseekOCRForCausalLM"},
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": [[1024, 1024]],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": language,
        "projector_config": {
            "model_type": "mlp_projector",
            "input_dim": 2 * CHANNELS[1],
            "n_embed": HIDDEN,
            "projector_type": "linear",
        },
        "vision_config": {
            "image_size": BASE,
            "mlp_ratio": 3.7362,
            "model_name": "deeplip_b_l",
            "model_type": "vision",
            "width": {"clip-l-14-224": CLIP, "sam_vit_b": SAM},
        },
        **more,
    }


def make_sam(size: int) -> Any:
    values = {"num_hidden_layers": 3, "num_attention_heads": 2, "global_attn_indexes": [1]}
    config = SamVisionConfig(
        hidden_size=WIDTH,
        output_channels=256,
        image_size=size,
        patch_size=16,
        window_size=14,
        mlp_dim=4 * WIDTH,
        **values,
    )
    config._attn_implementation = "eager"
    return SamVisionEncoder(config).eval()


def make_clip() -> Any:
    values = {"num_hidden_layers": 2, "num_attention_heads": 3}
    config = CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=4 * 24,
        image_size=42,
        patch_size=14,
        hidden_act="quick_gelu",
        attn_implementation="eager",
        **values,
    )
    return CLIPVisionModel(config).eval()


def spread(plane: Tensor, side: int) -> Tensor:
    """Stretch learned positions: [1, grid, grid, width] → [1, side, side, width]."""
    options: Any = {"mode": "bicubic", "antialias": True, "align_corners": False}
    moved = functional.interpolate(plane.permute(0, 3, 1, 2), size=(side, side), **options)
    return moved.permute(0, 2, 3, 1)


SAM_NAMES = {
    r"^patch_embed\.projection": "patch_embed.proj",
    r"^layers": "blocks",
    r"layer_norm(\d)\.": r"norm\1.",
    r"^neck\.conv1": "neck.0",
    r"^neck\.norm1": "neck.1",
    r"^neck\.conv2": "neck.2",
    r"^neck\.norm2": "neck.3",
}
CLIP_NAMES = {r"^vision_model\.": "", r"^encoder\.layers": "transformer.layers"}


def named(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors with other names. Those of queries, keys and values become one."""
    renamed = {}
    for name, tensor in tensors.items():
        if ".k_proj" in name or ".v_proj" in name or "position_ids" in name:
            continue
        if ".q_proj" in name:
            others = [tensors[name.replace("q_proj", part)] for part in ("k_proj", "v_proj")]
            name, tensor = name.replace("q_proj", "qkv_proj"), torch.cat([tensor, *others])
        for pattern, new in names.items():
            name = re.sub(pattern, new, name)
        renamed[name] = tensor
    return renamed


class Rows:
    """What the published code makes of the views of an image."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.sams = {BASE: make_sam(BASE)}
        randomize(self.sams[BASE])
        self.clip = make_clip()
        randomize(self.clip)
        self.first = nn.Conv2d(256, CHANNELS[0], 3, stride=2, padding=1, bias=False)
        self.last = nn.Conv2d(*CHANNELS, 3, stride=2, padding=1, bias=False)
        self.layer = nn.Linear(2 * CHANNELS[1], HIDDEN)
        self.newline = torch.randn(HIDDEN)
        self.separator = torch.randn(HIDDEN)

    def tensors(self) -> dict[str, Tensor]:
        parts = {
            "sam_model.": named(self.sams[BASE].state_dict(), SAM_NAMES),
            "sam_model.net_2.": self.first.state_dict(),
            "sam_model.net_3.": self.last.state_dict(),
            "vision_model.": named(self.clip.state_dict(), CLIP_NAMES),
            "projector.layers.": self.layer.state_dict(),
            "": {"image_newline": self.newline, "view_seperator": self.separator},
        }
        return {
            f"model.{prefix}{name}": tensor
            for prefix, tensors in parts.items()
            for name, tensor in tensors.items()
            if "post_layernorm" not in name
        }

    def sam(self, size: int) -> Any:
        """Return SAM for another size, with learned positions that are stretched. It stretches
        those that depend on distances itself."""
        if size not in self.sams:
            state = dict(self.sams[BASE].state_dict())
            state["pos_embed"] = spread(state["pos_embed"], size // 16)
            encoder = make_sam(size)
            for index in (1,):
                for name in ("rel_pos_h", "rel_pos_w"):
                    table = state[f"layers.{index}.attn.{name}"]
                    count = 2 * (size // 16) - 1
                    lines = functional.interpolate(table.T[None], size=count, mode="linear")
                    state[f"layers.{index}.attn.{name}"] = lines[0].T
            encoder.load_state_dict(state)
            self.sams[size] = encoder
        return self.sams[size]

    def views(self, pixels: Tensor) -> list[Tensor]:
        """[views, 3, size, size] → the rows [side, side, width] of each."""
        plane = self.sam(pixels.shape[-1])(pixels).last_hidden_state
        plane = self.last(self.first(plane))
        side = plane.shape[-1]
        inner = getattr(self.clip, "vision_model", self.clip)
        table = inner.embeddings.position_embedding.weight
        grid = spread(table[1:].view(1, 3, 3, -1), side).flatten(1, 2)
        vectors = plane.flatten(2).transpose(1, 2) + grid
        first = (inner.embeddings.class_embedding + table[0]).expand(len(plane), 1, -1)
        hidden = inner.pre_layrnorm(torch.cat([first, vectors], 1))
        hidden = inner.encoder(inputs_embeds=hidden).last_hidden_state[:, 1:]
        features = torch.cat([hidden, plane.flatten(2).transpose(1, 2)], 2)
        return [view.unflatten(0, (side, side)) for view in self.layer(features)]

    def lines(self, plane: Tensor) -> Tensor:
        return torch.cat([plane, self.newline.expand(len(plane), 1, -1)], 1).flatten(0, 1)

    def __call__(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Arrays of our processor → [rows, width]."""
        with torch.no_grad():
            whole = self.lines(self.views(arrays["pixel_values"][None])[0])
            if "crops" not in arrays:
                return torch.cat([whole, self.separator[None]])
            below, beside = arrays["tiles"].tolist()
            tiles = self.views(arrays["crops"])
            lines = [torch.cat(tiles[i * beside : (i + 1) * beside], 1) for i in range(below)]
            return torch.cat([self.lines(torch.cat(lines)), whole, self.separator[None]])


def write(folder: Path) -> RowsReference:
    config = config_of()
    rows = Rows()
    model = their_language("ordinary attention")
    write_published(folder, model, "", rows.tensors(), config, VALUES)
    processor = DeepseekOCRProcessor(None, image_setup(folder, config, [MARK]))

    def rows_of(image: Any) -> Tensor:
        arrays = processor.process("image", image, {}).arrays
        return rows({name: torch.from_numpy(value) for name, value in arrays.items()})

    def inputs(one: Any) -> Any:
        return {}

    reference = RowsReference(folder, model, inputs, rows_of)
    reference.views = rows  # type: ignore[attr-defined]
    return reference


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RowsReference:
    return write(tmp_path_factory.mktemp("deepseek_ocr"))


@pytest.mark.parametrize("most", [sam.MOST, 1000], ids=["at once", "line by line"])
def test_rows(reference: Any, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Of images of other sizes than those of the learned positions, with windows that go over the
    edge, and with tiles of several shapes."""
    monkeypatch.setattr(sam, "MOST", most)
    ours, _ = built_model(DeepseekOCR, reference.directory)
    torch.manual_seed(5)
    items = [
        {"pixel_values": torch.randn(3, BASE, BASE)},
        {"pixel_values": torch.randn(3, 368, 368)},
        {
            "pixel_values": torch.randn(3, 64, 64),
            "crops": torch.randn(6, 3, 112, 112),
            "tiles": torch.tensor([2, 3]),
        },
        {
            "pixel_values": torch.randn(3, BASE, BASE),
            "crops": torch.randn(2, 3, SIDE, SIDE),
            "tiles": torch.tensor([2, 1]),
        },
    ]
    for item, rows in zip(items, ours.encode("image", items), strict=True):
        torch.testing.assert_close(rows, reference.views(item), atol=1e-4, rtol=1e-4)


def test_the_tensors_that_are_read(reference: Any) -> None:
    """All but CLIP's own embedding of patches."""
    _, used = built_model(DeepseekOCR, reference.directory)
    left = load_file(reference.directory / "model.safetensors").keys() - used
    assert left == {"model.vision_model.embeddings.patch_embedding.weight"}
    _, later = built_model(DeepseekOCR, reference.directory, layers=range(1, 2))
    assert not any("sam_model" in name or "projector" in name for name in later)


class TestParity(MediaParity):
    prompts = staticmethod(lambda: some_prompts(MARK))


def test_other_sizes(reference: RowsReference) -> None:
    """Without tiles: 2 lines of 2 rows, their ends, and the end of the image."""
    one = prompt(4, random_image(60, 50), 5, mark=MARK)
    sizes = {"crop_mode": False, "image_size": 100}
    with open_media_llm(reference.directory) as llm:
        (output,) = llm.generate([{**one, "mm_processor_kwargs": sizes}], use_tqdm=False)
    assert output.prompt_token_ids.count(IMAGE) == 7


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("", {"tile_tag": "1D"}, "tile_tag='1D'; only '2D' is supported"),
    ("", {"global_view_pos": "tail"}, "global_view_pos='tail'; only 'head' is supported"),
    ("vision_config", {"width": 768}, "has width=768; expected an object"),
    ("vision_config", {"image_size": 15}, "image_size=15; expected at least a patch of 16 pixels"),
    ("vision_config", {"image_size": 0}, "image_size=0; expected a whole number from 1 on"),
    ("sam_vit_b", {"global_attn_indexes": [3]}, "[3]; expected numbers of layers from 0 to 2"),
    ("sam_vit_b", {"downsample_channels": [8]}, "[8]; expected two whole numbers"),
    ("sam_vit_b", {"downsample_channels": [6, 8]}, "expected the last one to be the width of CLI"),
    ("sam_vit_b", {"heads": 3}, "hidden_size=16, which is not a multiple of num_attention_heads=3"),
    ("clip-l-14-224", {"layers": "2"}, "clip-l-14-224 has layers='2'; expected a whole number"),
    ("projector_config", {"projector_type": "downsample_mlp_gelu"}, "takes 'linear', because its"),
    ("projector_config", {"input_dim": 8}, "input_dim=8; the features of its vision tower have 48"),
]


@pytest.mark.parametrize(("place", "values", "message"), REFUSED)
def test_configs_that_are_refused(place: str, values: dict[str, Any], message: str) -> None:
    config = config_of()
    towers = config["vision_config"]["width"]
    if place in towers:
        towers = {**towers, place: {**towers[place], **values}}
        place, values = "vision_config", {"width": towers}
    config = {**config, **(values if not place else {place: {**config[place], **values}})}
    with pytest.raises(ModelError, match=re.escape(message)):
        DeepseekOCR(config, fake_build(stored=["model.layers.0.x"], models=language_model))


def test_odd_values() -> None:
    check_odd_values(DeepseekOCR, config_of(), ["model.layers.0.x"])
