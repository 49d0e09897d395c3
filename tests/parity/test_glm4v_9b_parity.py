"""GLM-4V-9B, compared with its tower, which is written out here, and with transformers' GLM at the
published positions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pegboard_model_glm4v.glm4v_9b import Glm4v9b
from pegboard_model_glm4v.square_processor import SquareProcessor
from safetensors.torch import load_file, save_file
from test_dense_families import chatglm
from tiny_media import (
    MEDIA_TEXT,
    MediaParity,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    check_output,
    make_tokenizer,
    open_media_llm,
    prompt,
    random_model,
    some_prompts,
)
from torch import Tensor
from torch.nn import functional

from pegboard import SamplingParams
from pegboard.errors import ModelError
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build
from pegboard_testing.media_peers import image_setup
from pegboard_weights.hf_files import architectures

BEGIN, PAD, END = 100, 101, 102
SPECIAL = ["<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>"]
MARK = " ".join(SPECIAL)
SIDE = 24
PATCH = 4
GRID = SIDE // PATCH
WIDTH = 24
LAYERS = 2
VISION = {
    "dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_size": WIDTH,
    "image_size": SIDE,
    "in_channels": 3,
    "intermediate_size": 40,
    "layer_norm_eps": 1e-6,
    "num_heads": 3,
    "num_hidden_layers": LAYERS,
    "num_positions": GRID**2 + 1,
    "patch_size": PATCH,
    "scaling_factor": 2,
}
HIDDEN = MEDIA_TEXT["hidden_size"]
INNER = MEDIA_TEXT["intermediate_size"]
DIM = HIDDEN // MEDIA_TEXT["num_attention_heads"]


class Reference(MediaReference):
    tensors: Mapping[str, Tensor]
    processor: Any

    @torch.no_grad()
    def rows(self, pixels: Tensor) -> Tensor:
        """Return the rows of an image [3, size, size]."""

        def linear(name: str, value: Tensor) -> Tensor:
            weight = self.tensors[f"{name}.weight"]
            return functional.linear(value, weight, self.tensors.get(f"{name}.bias"))

        def norm(name: str, value: Tensor, eps: float) -> Tensor:
            parts = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
            return functional.layer_norm(value, value.shape[-1:], *parts, eps)

        given = self.tensors
        place = "patch_embedding"
        convolution = given[f"{place}.proj.weight"], given[f"{place}.proj.bias"]
        vectors = functional.conv2d(pixels[None], *convolution, stride=PATCH)[0].flatten(1).T
        hidden = torch.cat([given[f"{place}.cls_embedding"], vectors])
        hidden = hidden + given[f"{place}.position_embedding.weight"]
        for index in range(LAYERS):
            layer = f"transformer.layers.{index}"
            split = linear(f"{layer}.attention.query_key_value", hidden).view(len(hidden), 3, 3, -1)
            query, key, value = split.permute(1, 2, 0, 3)
            scores = (query @ key.mT / (WIDTH // 3) ** 0.5).softmax(-1)
            mixed = linear(f"{layer}.attention.dense", (scores @ value).transpose(0, 1).flatten(1))
            hidden = hidden + norm(f"{layer}.input_layernorm", mixed, 1e-6)
            inner = linear(f"{layer}.mlp.fc2", functional.gelu(linear(f"{layer}.mlp.fc1", hidden)))
            hidden = hidden + norm(f"{layer}.post_attention_layernorm", inner, 1e-6)
        plane = hidden[1:].T.view(1, WIDTH, GRID, GRID)
        merged = functional.conv2d(plane, given["conv.weight"], given["conv.bias"], stride=2)
        rows = linear("linear_proj.linear_proj", merged[0].flatten(1).T)
        rows = functional.gelu(norm("linear_proj.norm1", rows, 1e-5))
        gate = functional.silu(linear("linear_proj.gate_proj", rows))
        rows = linear("linear_proj.dense_4h_to_h", gate * linear("linear_proj.dense_h_to_4h", rows))
        return torch.cat([given["boi"][0], rows, given["eoi"][0]]) / VISION["scaling_factor"]

    def logprobs(self, one: Prompt, outputs: Any) -> Tensor:
        """All patches of an image have the position of the token between those of its ends."""
        images = iter(one.get("multi_modal_data", {}).get("image", ()))
        embed = self.model.get_input_embeddings()
        parts = []
        positions = []
        words = iter(one["prompt"].split())
        with torch.no_grad():
            for word in words:
                after = positions[-1] + 1 if positions else 0
                if word == SPECIAL[0]:
                    pixels = self.processor.process("image", next(images), {}).arrays
                    parts.append(self.rows(torch.from_numpy(pixels["pixel_values"])))
                    positions += [after, *[after + 1] * (len(parts[-1]) - 2), after + 2]
                    next(words), next(words)
                else:
                    parts.append(embed(torch.tensor([int(word[1:])])))
                    positions.append(after)
            parts.append(embed(torch.tensor([*outputs]).long()))
            positions += range(positions[-1] + 1, positions[-1] + 1 + len(outputs))
            logits = self.model(
                inputs_embeds=torch.cat(parts)[None], position_ids=torch.tensor([positions])
            ).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def random_tower() -> dict[str, Tensor]:
    """Return the tensors of a tower under the published names."""
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "patch_embedding.proj.bias": (WIDTH,),
        "patch_embedding.cls_embedding": (1, WIDTH),
        "patch_embedding.position_embedding.weight": (GRID**2 + 1, WIDTH),
        "conv.weight": (HIDDEN, WIDTH, 2, 2),
        "conv.bias": (HIDDEN,),
        "boi": (1, 1, HIDDEN),
        "eoi": (1, 1, HIDDEN),
        "linear_proj.linear_proj.weight": (HIDDEN, HIDDEN),
        "linear_proj.norm1.weight": (HIDDEN,),
        "linear_proj.norm1.bias": (HIDDEN,),
        "linear_proj.gate_proj.weight": (INNER, HIDDEN),
        "linear_proj.dense_h_to_4h.weight": (INNER, HIDDEN),
        "linear_proj.dense_4h_to_h.weight": (HIDDEN, INNER),
    }
    for index in range(LAYERS):
        layer = f"transformer.layers.{index}"
        for name, rows, columns in (
            ("attention.query_key_value", 3 * WIDTH, WIDTH),
            ("attention.dense", WIDTH, WIDTH),
            ("mlp.fc1", 40, WIDTH),
            ("mlp.fc2", WIDTH, 40),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            shapes[f"{layer}.{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{layer}.{name}.{kind}": (WIDTH,) for kind in ("weight", "bias")}
    torch.manual_seed(8)
    return {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}


def in_halves(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors for a model whose pairs of channels are one of each half of those that are
    rotated. transformers' pairs are beside each other."""
    turned = DIM // 2
    order = torch.cat([torch.arange(0, turned, 2), torch.arange(1, turned, 2)])
    order = torch.cat([order, torch.arange(turned, DIM)])
    return {
        name: value.unflatten(0, (-1, DIM))[:, order].flatten(0, 1)
        if "q_proj" in name or "k_proj" in name
        else value
        for name, value in tensors.items()
    }


def write(folder: Path, **more: Any) -> Reference:
    """Write a checkpoint with the published names."""
    sizes = {**MEDIA_TEXT, "head_dim": DIM, "attention_bias": True, "rms_norm_eps": 1e-5}
    rope = {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5}
    model = random_model(
        transformers.AutoModelForCausalLM,
        "glm",
        **sizes,
        tie_word_embeddings=False,
        rope_parameters=rope,
        pad_token_id=0,
    )
    language = model.state_dict()
    if more.get("original_rope") is False:
        language = in_halves(language)
    tower = random_tower()
    named = dict(chatglm(language, None))
    named |= {f"transformer.vision.{name}": value for name, value in tower.items()}
    stored = {name: value.detach().clone().contiguous() for name, value in named.items()}
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_residual_connection_post_layernorm": False,
        "boi_token_id": BEGIN,
        "eoi_token_id": END,
        "pad_token_id": PAD,
        "ffn_hidden_size": INNER,
        "hidden_size": HIDDEN,
        "kv_channels": DIM,
        "layernorm_epsilon": 1e-5,
        "multi_query_attention": True,
        "multi_query_group_num": MEDIA_TEXT["num_key_value_heads"],
        "num_attention_heads": MEDIA_TEXT["num_attention_heads"],
        "num_layers": MEDIA_TEXT["num_hidden_layers"],
        "original_rope": True,
        "padded_vocab_size": MEDIA_TEXT["vocab_size"],
        "post_layer_norm": True,
        "rmsnorm": True,
        "rope_ratio": 2,
        "seq_length": MEDIA_TEXT["max_position_embeddings"],
        "tie_word_embeddings": False,
        "vision_config": VISION,
        "vocab_size": MEDIA_TEXT["vocab_size"],
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(SPECIAL, MARK).save_pretrained(folder)
    reference = Reference(folder, model, lambda one: {})
    reference.tensors = tower
    setup = image_setup(folder, config, [])
    reference.processor = SquareProcessor(None, setup)
    return reference


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return write(tmp_path_factory.mktemp("glm4v_9b"))


def test_rows(reference: Reference) -> None:
    """All tensors are read."""
    model, used = built_model(Glm4v9b, reference.directory)
    assert used == set(load_file(reference.directory / "model.safetensors"))
    images = [torch.randn(3, SIDE, SIDE) for _ in range(3)]
    with torch.no_grad():
        rows = model.encode("image", [{"pixel_values": image} for image in images])
    for image, ours in zip(images, rows, strict=True):
        assert len(ours) == (GRID // 2) ** 2 + 2
        torch.testing.assert_close(ours, reference.rows(image), atol=1e-4, rtol=1e-4)


class TestParity(MediaParity):
    prompts = staticmethod(lambda: some_prompts(MARK))


def test_pairs_of_channels_of_two_halves(tmp_path: Path) -> None:
    check_media(write(tmp_path, original_rope=False), some_prompts(MARK)[:3])


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
    pixels = reference.processor.process("image", image, {}).arrays["pixel_values"]
    rows = reference.rows(torch.from_numpy(pixels))
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    sent = {**one, "multi_modal_data": {"image": rows[None]}}
    with open_media_llm(reference.directory, enable_mm_embeds=True) as llm:
        (output,) = llm.generate([sent], params, use_tqdm=False)
    check_output(reference, one, output.outputs[0], 1e-4)


def test_the_published_name(tmp_path: Path) -> None:
    """The published config has the name of the language model."""
    text = {"architectures": ["ChatGLMModel"], "model_type": "chatglm"}
    assert architectures(text, tmp_path) == ("ChatGLMModel",)
    assert architectures({**text, "vision_config": VISION}, tmp_path) == ("GLM4VForCausalLM",)


def test_only_the_first_stage_has_a_tower(reference: Reference) -> None:
    _, used = built_model(Glm4v9b, reference.directory, layers=range(1, 2))
    assert not any("vision" in name for name in used)


def test_an_activation_that_is_unknown(reference: Reference) -> None:
    config = json.loads((reference.directory / "config.json").read_text())
    config["vision_config"] = {**VISION, "hidden_act": "mish"}
    with pytest.raises(ModelError, match="unknown activation 'mish'"):
        Glm4v9b(config, fake_build(models=lambda *given: None))
