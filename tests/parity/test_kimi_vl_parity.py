"""Kimi-VL, compared with transformers' tower of Kimi-K2.5 for one frame, its DeepSeek-V3, and a
projector that is written out here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_kimi_vl.kimi_vl import KimiVL
from pegboard_model_kimi_vl.processor import KimiVLProcessor
from safetensors.torch import load_file, save_file
from test_latent_parity import EXPERTS, LATENT
from tiny_media import (
    MEDIA_TEXT,
    MediaParity,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    check_output,
    language_model,
    make_tokenizer,
    open_media_llm,
    prompt,
    random_model,
    some_prompts,
)
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from pegboard import SamplingParams
from pegboard.errors import ModelError
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build
from pegboard_testing.media_peers import image_setup

MARK = "<|media_pad|>"
IMAGE = 100
PATCH = 4
SIDE = 6
"""Lines and columns of the table of positions."""
HEADS = 3
WIDTH = 24
VISION = {
    "patch_size": PATCH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 3,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
}
PUBLISHED = {
    "model_type": "moonvit",
    "init_pos_emb_height": SIDE,
    "init_pos_emb_width": SIDE,
    "merge_kernel_size": [2, 2],
    **VISION,
}
TEXT = {
    **MEDIA_TEXT,
    **LATENT,
    **EXPERTS,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
}


class Reference(MediaReference):
    """parts: the tower, and the projector's tensors."""

    parts: tuple[Any, Mapping[str, Tensor]]
    processor: Any

    @torch.no_grad()
    def rows(self, pixels: Tensor, grid: Tensor) -> Tensor:
        """Return the rows of an image."""
        tower, tensors = self.parts
        grids = torch.tensor([[1, *grid.tolist()]])
        features = tower(pixels, grid_thw=grids).pooler_output
        norm = tensors["pre_norm.weight"], tensors["pre_norm.bias"]
        hidden = functional.layer_norm(features, (WIDTH,), *norm, 1e-5).flatten(1)
        hidden = hidden @ tensors["linear_1.weight"].T + tensors["linear_1.bias"]
        return functional.gelu(hidden) @ tensors["linear_2.weight"].T + tensors["linear_2.bias"]

    def logprobs(self, one: Prompt, outputs: Any) -> Tensor:
        images = iter(one.get("multi_modal_data", {}).get("image", ()))
        embed = self.model.get_input_embeddings()
        parts = []
        with torch.no_grad():
            for word in one["prompt"].split():
                if word == MARK:
                    arrays = self.processor.process("image", next(images), {}).arrays
                    parts.append(self.rows(*(torch.from_numpy(each) for each in arrays.values())))
                else:
                    parts.append(embed(torch.tensor([int(word[1:])])))
            parts.append(embed(torch.tensor([*outputs]).long()))
            logits = self.model(inputs_embeds=torch.cat(parts)[None]).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def published_tower(tower: Any) -> dict[str, Tensor]:
    """Return a tower's tensors under the published names. Published pairs of channels are beside
    each other; those of transformers are one of each half."""
    stored = tower.state_dict()
    tensors: dict[str, Tensor] = {}
    for index in range(VISION["num_hidden_layers"]):
        names = [f"layers.{index}.attn.{part}_proj" for part in "qkv"]
        for kind in ("weight", "bias"):
            query, key, value = (stored.pop(f"{name}.{kind}") for name in names)
            pairs = [
                part.unflatten(0, (HEADS, 2, -1)).transpose(1, 2).flatten(0, 2)
                for part in (query, key)
            ]
            tensors[f"encoder.blocks.{index}.wqkv.{kind}"] = torch.cat([*pairs, value])
    for name, value in stored.items():
        renamed = name
        for ours, theirs in (
            ("layers.", "encoder.blocks."),
            ("norm1", "norm0"),
            ("norm2", "norm1"),
            ("attn.proj", "wo"),
            ("fc1", "fc0"),
            ("fc2", "fc1"),
            ("final_layernorm", "encoder.final_layernorm"),
            ("pos_emb.position_embeddings", "pos_emb.weight"),
        ):
            renamed = renamed.replace(ours, theirs)
        tensors[renamed] = value
    return tensors


def random_tower() -> Any:
    config = Kimi_K25VisionConfig(**VISION, pos_emb_height=SIDE, pos_emb_width=SIDE)
    config._attn_implementation = "eager"
    torch.manual_seed(8)
    tower = Kimi_K25VisionModel(config).eval()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return tower


def write(folder: Path, **more: Any) -> Reference:
    """Write a checkpoint with the published names."""
    model = random_model(transformers.AutoModelForCausalLM, "deepseek_v3", **TEXT)
    model.save_pretrained(folder)
    language = load_file(folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    tower = random_tower()
    shapes = {
        "pre_norm.weight": (WIDTH,),
        "pre_norm.bias": (WIDTH,),
        "linear_1.weight": (4 * WIDTH, 4 * WIDTH),
        "linear_1.bias": (4 * WIDTH,),
        "linear_2.weight": (MEDIA_TEXT["hidden_size"], 4 * WIDTH),
        "linear_2.bias": (MEDIA_TEXT["hidden_size"],),
    }
    projector = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    named = {f"language_model.{name}": value for name, value in language.items()}
    named |= {f"vision_tower.{name}": value for name, value in published_tower(tower).items()}
    named |= {f"multi_modal_projector.{name}": value for name, value in projector.items()}
    stored = {name: value.detach().clone().contiguous() for name, value in named.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "auto_map": {"AutoConfig": "configuration_kimi_vl.KimiVLConfig"},
        "text_config": text,
        "vision_config": PUBLISHED,
        "media_placeholder_token_id": IMAGE,
        "vocab_size": MEDIA_TEXT["vocab_size"],
        "tie_word_embeddings": False,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    values = {"patch_size": PATCH, "pad_input": True, "in_token_limit": 30}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    make_tokenizer([MARK], MARK).save_pretrained(folder)
    reference = Reference(folder, model, lambda one: {})
    reference.parts = tower, projector
    reference.processor = KimiVLProcessor(None, image_setup(folder, config, [MARK]))
    return reference


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return write(tmp_path_factory.mktemp("kimi_vl"))


shapes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3)


@given(shapes)
@settings(max_examples=15, deadline=None)
def test_rows(reference: Reference, shapes: list[tuple[int, int]]) -> None:
    """Of images of some blocks, with one that has the size of the table of positions."""
    model, used = built_model(KimiVL, reference.directory)
    assert used == set(load_file(reference.directory / "model.safetensors"))
    items = []
    for height, width in [*shapes, (SIDE // 2, SIDE // 2)]:
        grid = torch.tensor([2 * height, 2 * width])
        pixels = torch.randn(4 * height * width, 3, PATCH, PATCH)
        items.append({"pixel_values": pixels, "image_grid_hw": grid})
    with torch.no_grad():
        rows = model.encode("image", items)
    for item, ours in zip(items, rows, strict=True):
        expected = reference.rows(item["pixel_values"], item["image_grid_hw"])
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


class TestParity(MediaParity):
    prompts = staticmethod(lambda: some_prompts(MARK))


def test_a_chat(reference: Reference) -> None:
    image = random_image(40, 20, seed=1)
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "w7 w8"}]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    check_output(reference, prompt(1, image, 7, 8, 3, mark=MARK), output.outputs[0], 1e-4)


def test_rows_that_a_client_sends(reference: Reference) -> None:
    image = random_image(13, 50, seed=2)
    one = prompt(5, image, 6, mark=MARK)
    arrays = reference.processor.process("image", image, {}).arrays.values()
    rows = reference.rows(*(torch.from_numpy(each) for each in arrays))
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    sent = {**one, "multi_modal_data": {"image": rows[None]}}
    with open_media_llm(reference.directory, enable_mm_embeds=True) as llm:
        (output,) = llm.generate([sent], params, use_tqdm=False)
    check_output(reference, one, output.outputs[0], 1e-4)


def test_a_text_config_without_a_model_type(tmp_path: Path) -> None:
    reference = write(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name in ("model_type", "architectures"):
        del config["text_config"][name]
    path.write_text(json.dumps(config))
    check_media(reference, some_prompts(MARK)[:1])


def test_only_the_first_stage_has_a_tower(reference: Reference) -> None:
    _, used = built_model(KimiVL, reference.directory, layers=range(1, 2))
    assert not any("vision_tower" in name or "projector" in name for name in used)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_config": None}, "text_config has model_type=None"),
        ({"vision_config": {"model_type": "moonvit3d"}}, "model_type='moonvit3d'; expected 'moon"),
        ({"vision_config": {"merge_kernel_size": [2, 3]}}, "expected two equal whole numbers"),
    ],
)
def test_configs_that_are_refused(values: Mapping[str, Any], message: str) -> None:
    config = {"text_config": {"model_type": "llama", **MEDIA_TEXT}, **values}
    with pytest.raises(ModelError, match=message):
        KimiVL(config, fake_build(models=language_model))
