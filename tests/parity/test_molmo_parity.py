"""Molmo, compared with transformers' CLIP, Qwen 2 and OLMo 2, and with its attention pooling and
projector, which are written out here."""

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
from pegboard_model_molmo.molmo import Molmo
from pegboard_model_molmo.processor import BEGIN, TOKENS, MolmoProcessor
from safetensors.torch import load_file, save_file
from tiny_media import (
    MEDIA_TEXT,
    MediaParity,
    MediaReference,
    Prompt,
    built_model,
    check_output,
    make_tokenizer,
    open_media_llm,
    prompt,
    random_model,
    some_prompts,
)
from tiny_models import VOCAB_SIZE
from torch import Tensor
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel

from pegboard import SamplingParams
from pegboard.errors import ModelError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build
from pegboard_testing.media_peers import PeerTokenizer, image_setup

FIRST = 100
SPECIAL = [BEGIN, *(f"<unused {number}>" for number in range(VOCAB_SIZE - 101)), *TOKENS]
"""The last ones are the first tokens of the second table."""
PATCH = 4
GRID = 6
WIDTH = 24
VISION = {
    "image_default_input_size": [GRID * PATCH, GRID * PATCH],
    "image_patch_size": PATCH,
    "image_emb_dim": WIDTH,
    "image_num_heads": 3,
    "image_num_layers": 4,
    "image_mlp_dim": 40,
}
LAYERS = [-2, -4]
HIDDEN = MEDIA_TEXT["hidden_size"]
INNER = MEDIA_TEXT["intermediate_size"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "7B-D": ("qwen2", {"qkv_bias": True, "layer_norm_eps": 1e-6, "rope_theta": 5e4}),
    "7B-O": (
        "olmo2",
        {"norm_after": True, "attention_layer_norm": True, "layer_norm_eps": 1e-5},
    ),
    "limited": ("qwen2", {"qkv_bias": True, "layer_norm_eps": 1e-6, "clip_qkv": 0.3}),
}
"""The language model in transformers, and the config."""


class Reference(MediaReference):
    """parts: CLIP, and the other tensors of the tower's side."""

    parts: tuple[Any, Mapping[str, Tensor]]
    processor: Any

    @torch.no_grad()
    def rows(self, pixels: Tensor, masks: Tensor, places: Tensor) -> Tensor:
        """Return the rows of an image: all blocks are pooled, and those of the rows are chosen."""
        clip, tensors = self.parts
        cut = pixels.view(len(pixels), GRID, GRID, PATCH, PATCH, 3).permute(0, 5, 1, 3, 2, 4)
        images = cut.reshape(len(pixels), 3, GRID * PATCH, GRID * PATCH)
        states = clip(images, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][:, 1:] for layer in LAYERS], -1)
        empty, some = tensors["pad_embed"]
        features = torch.where((masks == 0)[..., None], features + empty, features)
        is_partial = (masks < 1) & (masks != 0)
        features = torch.where(is_partial[..., None], features + some, features)
        blocks = features.view(-1, GRID // 2, 2, GRID // 2, 2, 2 * WIDTH).transpose(2, 3)
        blocks = blocks.reshape(-1, 4, 2 * WIDTH)

        def projected(name: str, value: Tensor) -> Tensor:
            weight = tensors[f"image_pooling_2d.{name}.weight"]
            return functional.linear(value, weight, tensors[f"image_pooling_2d.{name}.bias"])

        query, key, value = (
            projected(name, rows).unflatten(-1, (3, -1)).transpose(1, 2)
            for name, rows in (("wq", blocks.mean(1, keepdim=True)), ("wk", blocks), ("wv", blocks))
        )
        scores = (query @ key.mT / (WIDTH // 3) ** 0.5).softmax(-1)
        pooled = projected("wo", (scores @ value).transpose(1, 2).flatten(1))
        gate, down, up = (tensors[f"image_projector.w{number}.weight"] for number in (1, 2, 3))
        return ((functional.silu(pooled @ gate.T) * (pooled @ up.T)) @ down.T)[places]

    def logprobs(self, one: Prompt, outputs: Any) -> Tensor:
        embed = self.model.get_input_embeddings()
        words = [int(word[1:]) for word in one["prompt"].split()]
        parts = [embed(torch.tensor([FIRST]))]
        with torch.no_grad():
            for image in one.get("multi_modal_data", {}).get("image", ()):
                processed = self.processor.process("image", image, {})
                tokens = embed(torch.tensor(processed.token_ids))
                arrays = (torch.from_numpy(each) for each in processed.arrays.values())
                tokens[torch.from_numpy(processed.is_row)] = self.rows(*arrays)
                parts.append(tokens)
            parts.append(embed(torch.tensor([*words, *outputs]).long()))
            logits = self.model(inputs_embeds=torch.cat(parts)[None]).logits[0, :, :VOCAB_SIZE]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def published_language(model: Any) -> dict[str, Tensor]:
    """Return the tensors of transformers' language model under the names of OLMo."""
    stored = dict(model.state_dict())
    table = stored.pop("model.embed_tokens.weight")
    tensors = {
        "wte.embedding": table[:VOCAB_SIZE],
        "wte.new_embedding": table[VOCAB_SIZE:],
        "ff_out.weight": stored.pop("lm_head.weight")[:VOCAB_SIZE],
        "ln_f.weight": stored.pop("model.norm.weight"),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if "model.layers.0.post_feedforward_layernorm.weight" in stored:
        norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
    for index in range(MEDIA_TEXT["num_hidden_layers"]):
        place, layer = f"blocks.{index}", f"model.layers.{index}"
        for kind in ("weight", "bias"):
            names = [f"{layer}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            if names[0] in stored:
                tensors[f"{place}.att_proj.{kind}"] = torch.cat([stored.pop(n) for n in names])
        both = [stored.pop(f"{layer}.mlp.{part}_proj.weight") for part in ("up", "gate")]
        tensors[f"{place}.ff_proj.weight"] = torch.cat(both)
        for ours, theirs in (
            ("attn_out", "self_attn.o_proj"),
            ("ff_out", "mlp.down_proj"),
            ("attn_norm", norms[0]),
            ("ff_norm", norms[1]),
            ("q_norm", "self_attn.q_norm"),
            ("k_norm", "self_attn.k_norm"),
        ):
            if (name := f"{layer}.{theirs}.weight") in stored:
                tensors[f"{place}.{ours}.weight"] = stored.pop(name)
    assert not stored, stored.keys()
    return {f"model.transformer.{name}": value for name, value in tensors.items()}


def published_tower(clip: Any) -> dict[str, Tensor]:
    """Return the tensors of transformers' CLIP under the published names."""
    tensors: dict[str, Tensor] = {}
    pairs = (
        ("vision_model.", ""),
        ("embeddings.class_embedding", "class_embedding"),
        ("embeddings.position_embedding.weight", "positional_embedding"),
        ("embeddings.", ""),
        ("pre_layrnorm", "pre_ln"),
        ("encoder.layers", "transformer.resblocks"),
        ("layer_norm1", "attention_norm"),
        ("layer_norm2", "ffn_norm"),
        ("self_attn", "attention"),
        ("q_proj", "wq"),
        ("k_proj", "wk"),
        ("v_proj", "wv"),
        ("out_proj", "wo"),
        ("mlp.fc", "feed_forward.w"),
    )
    for name, value in clip.state_dict().items():
        renamed = name
        for theirs, ours in pairs:
            renamed = renamed.replace(theirs, ours)
        if renamed == "patch_embedding.weight":
            value = value.permute(0, 2, 3, 1).flatten(1)
        if "post_layernorm" not in name:
            tensors[renamed] = value
    return tensors


def random_clip() -> Any:
    config = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=VISION["image_mlp_dim"],
        num_hidden_layers=VISION["image_num_layers"],
        num_attention_heads=3,
        image_size=GRID * PATCH,
        patch_size=PATCH,
    )
    torch.manual_seed(9)
    clip = CLIPVisionModel(config).eval()
    with torch.no_grad():
        for parameter in clip.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return clip


def write(folder: Path, kind: str = "7B-D", **more: Any) -> Reference:
    """Write a checkpoint with the published names."""
    model_type, values = KINDS[kind]
    text = {**MEDIA_TEXT, "vocab_size": VOCAB_SIZE + 128, "tie_word_embeddings": False}
    theta = values.get("rope_theta", 10000.0)
    model = random_model(
        transformers.AutoModelForCausalLM,
        model_type,
        **{**text, "rms_norm_eps": values["layer_norm_eps"]},
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    if limit := values.get("clip_qkv"):
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                projection = getattr(layer.self_attn, name)
                projection.register_forward_hook(lambda *given: given[-1].clamp(-limit, limit))
    clip = random_clip()
    shapes: dict[str, tuple[int, ...]] = {
        "pad_embed": (2, 2 * WIDTH),
        **{f"image_pooling_2d.{name}.weight": (WIDTH, 2 * WIDTH) for name in ("wq", "wk", "wv")},
        "image_pooling_2d.wo.weight": (WIDTH, WIDTH),
        **{f"image_pooling_2d.{name}.bias": (WIDTH,) for name in ("wq", "wk", "wv", "wo")},
        "image_projector.w1.weight": (INNER, WIDTH),
        "image_projector.w2.weight": (HIDDEN, INNER),
        "image_projector.w3.weight": (INNER, WIDTH),
    }
    others = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    seen = {f"image_vit.{name}": value for name, value in published_tower(clip).items()} | others
    named = published_language(model)
    named |= {f"model.vision_backbone.{name}": value for name, value in seen.items()}
    stored = {name: value.detach().clone().contiguous() for name, value in named.items()}
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {
        name: MEDIA_TEXT[name]
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        )
    }
    config = {
        "architectures": ["MolmoForCausalLM"],
        "model_type": "molmo",
        "auto_map": {"AutoConfig": "config_molmo.MolmoConfig"},
        "attention_layer_norm": False,
        "clip_qkv": None,
        "embedding_size": VOCAB_SIZE,
        "vocab_size": VOCAB_SIZE - 3,
        "intermediate_size": 2 * INNER,
        "layer_norm_type": "rms",
        "norm_after": False,
        "qkv_bias": False,
        "rope_theta": theta,
        "tie_word_embeddings": False,
        "use_position_ids": True,
        "weight_tying": False,
        "vision_backbone": VISION,
        "vit_layers": LAYERS,
        **sizes,
        **values,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    images = {"max_crops": 4, "overlap_margins": [2, 2], "base_image_input_size": [24, 24]}
    file = {"image_processor_type": "MolmoImageProcessor", **images}
    (folder / "preprocessor_config.json").write_text(json.dumps(file))
    tokenizer = make_tokenizer(SPECIAL, "")
    tokenizer.save_pretrained(folder)
    peer: Any = PeerTokenizer(tokenizer)
    setup = MultiModalProcessorSetup(image_setup(folder, config, []).checkpoint, peer)
    reference = Reference(folder, model, lambda one: {})
    reference.parts = clip, others
    reference.processor = MolmoProcessor(None, setup)
    return reference


@pytest.fixture(scope="module", params=KINDS)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return write(tmp_path_factory.mktemp("molmo"), request.param)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return write(tmp_path_factory.mktemp("molmo"))


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_rows(published: Reference, sizes: list[tuple[int, int]]) -> None:
    """All tensors are read but those of the tower's last layer."""
    model, used = built_model(Molmo, published.directory)
    unused = set(load_file(published.directory / "model.safetensors")) - used
    assert {name.split(".")[5] for name in unused} == {"3"}
    images = [random_image(*size) for size in sizes if max(size) < 20 * min(size)]
    items = [published.processor.process("image", image, {}).arrays for image in images]
    tensors = [{name: torch.from_numpy(a) for name, a in item.items()} for item in items]
    with torch.no_grad():
        rows = model.encode("image", tensors)
    for item, ours in zip(tensors, rows, strict=True):
        torch.testing.assert_close(ours, published.rows(*item.values()), atol=1e-4, rtol=1e-4)


class TestParity(MediaParity):
    prompts = staticmethod(lambda: some_prompts(""))


def test_a_chat(published: Reference) -> None:
    image = random_image(40, 20, seed=1)
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "w7 w8"}]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(published.directory) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
        prompts = [{"prompt_token_ids": [FIRST, 5]}, {"prompt": "w5"}]
        begun = [each.prompt_token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
    check_output(published, prompt(image, 1, 7, 8, 3, mark=""), output.outputs[0], 1e-4)
    assert begun == [[FIRST, 5]] * 2
    assert all(output.outputs[0].logprobs[0][VOCAB_SIZE + n].logprob == -torch.inf for n in (0, 5))


def test_only_the_first_stage_has_a_tower(published: Reference) -> None:
    _, used = built_model(Molmo, published.directory, layers=range(1, 2))
    assert not any("vision_backbone" in name for name in used)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_norm_type": "default"}, "layer_norm_type='default'; only 'rms' is supported"),
        ({"weight_tying": True}, "weight_tying=True; only False"),
        ({"intermediate_size": 33}, "intermediate_size=33; expected an even number"),
        ({"vit_layers": [-5]}, r"vit_layers=\[-5\]; expected numbers of layers, from -4 to 3"),
        ({"vision_backbone": 5}, "vision_backbone=5; expected an object"),
    ],
)
def test_configs_that_are_refused(
    published: Reference, values: Mapping[str, Any], message: str
) -> None:
    config = json.loads((published.directory / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        Molmo({**config, **values}, fake_build())
