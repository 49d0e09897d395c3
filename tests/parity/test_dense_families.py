"""Decoders whose code is in their checkpoints. Most compute what an architecture of transformers
computes, under other names and with merged tensors: a twin model of transformers is written in the
family's layout and compared. The others are compared with their formulas in plain torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

Tensors = dict[str, Tensor]
Layout = Callable[[Tensors, Any], Tensors]

HEADS = 4
DIM = 8
LAYERS = 3
HIDDEN = 32
WIDTH = 48
VOCAB = 131
ALL_HEADS = {"num_key_value_heads": HEADS}


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Replace parts of names, in the order that is given."""
    made = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        made[name] = tensor
    return made


def merged(
    tensors: Tensors,
    parts: tuple[str, ...],
    name: str,
    join: Callable[[list[Tensor]], Tensor] = torch.cat,
) -> Tensors:
    """Replace the modules `parts` of each layer by one with this name."""
    made = dict(tensors)
    for first in [key for key in tensors if key.rpartition(".")[0].endswith(parts[0])]:
        keys = [first.replace(parts[0], part) for part in parts]
        made[first.replace(parts[0], name)] = join([made.pop(key) for key in keys])
    return made


def in_groups(parts: list[Tensor]) -> Tensor:
    """For each KV head: its queries, its key, its value."""
    q, k, v = (part.unflatten(0, (-1, DIM)) for part in parts)
    group = len(q) // len(k)
    rows = [row for i in range(len(k)) for row in (*q[i * group : (i + 1) * group], k[i], v[i])]
    return torch.cat(rows)


def in_pairs(weight: Tensor) -> Tensor:
    """Rows of Q or K with the two channels of each rotation next to each other."""
    return weight.unflatten(0, (-1, 2, DIM // 2)).transpose(1, 2).flatten(0, 2)


def baichuan(tensors: Tensors, config: Any) -> Tensors:
    return merged(tensors, ("q_proj", "k_proj", "v_proj"), "W_pack")


def internlm2(tensors: Tensors, config: Any) -> Tensors:
    tensors = merged(tensors, ("q_proj", "k_proj", "v_proj"), "wqkv", in_groups)
    names = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "self_attn.": "attention.",
        "o_proj": "wo",
    }
    names |= {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.": "feed_forward.",
    }
    return renamed(tensors, {**names, "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})


def qwen(tensors: Tensors, config: Any) -> Tensors:
    tensors = merged(tensors, ("q_proj", "k_proj", "v_proj"), "c_attn")
    names = {
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "model.embed_tokens": "transformer.wte",
    }
    names |= {
        "self_attn.": "attn.",
        "o_proj": "c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    }
    return renamed(tensors, {**names, "gate_proj": "w2", "up_proj": "w1", "down_proj": "c_proj"})


def telechat(tensors: Tensors, config: Any) -> Tensors:
    def by_head(parts: list[Tensor]) -> Tensor:
        k, v = (part.unflatten(0, (-1, DIM)) for part in parts)
        return torch.stack([k, v], 1).flatten(0, 2)

    absent = tuple(f"{name}_proj.bias" for name in ("q", "k", "v", "gate", "up"))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(absent)}
    names = {
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "self_attn.": "self_attention.",
    }
    names |= {
        "model.embed_tokens": "transformer.word_embeddings",
        "q_proj": "query",
        "o_proj": "dense",
    }
    return renamed(merged(tensors, ("k_proj", "v_proj"), "key_value", by_head), names)


def exaone(tensors: Tensors, config: Any) -> Tensors:
    names = {
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "model.embed_tokens": "transformer.wte",
    }
    names |= {"self_attn.": "attn.attention.", "o_proj": "out_proj", "input_layernorm": "ln_1"}
    names |= {
        "post_attention_layernorm": "ln_2",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
    }
    return renamed(tensors, names)


def fairseq2(tensors: Tensors, config: Any) -> Tensors:
    made = {
        name: in_pairs(t) if name.endswith(("q_proj.weight", "k_proj.weight")) else t
        for name, t in tensors.items()
    }
    names = {
        "model.layers": "decoder.layers",
        "model.norm": "decoder.layer_norm",
        "lm_head": "final_proj",
    }
    names |= {
        "model.embed_tokens": "decoder_frontend.embed",
        "input_layernorm": "self_attn_layer_norm",
    }
    names |= {
        "post_attention_layernorm": "ffn_layer_norm",
        "o_proj": "output_proj",
        "mlp.gate_proj": "ffn.gate_proj",
    }
    return renamed(
        made, {**names, "mlp.up_proj": "ffn.inner_proj", "mlp.down_proj": "ffn.output_proj"}
    )


def chatglm(tensors: Tensors, config: Any) -> Tensors:
    tensors = merged(tensors, ("q_proj", "k_proj", "v_proj"), "query_key_value")
    names = {
        "model.layers": "transformer.encoder.layers",
        "model.norm": "transformer.encoder.final_layernorm",
    }
    names |= {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "lm_head": "transformer.output_layer",
    }
    names |= {"self_attn.": "self_attention.", "o_proj": "dense", "gate_up_proj": "dense_h_to_4h"}
    return renamed(tensors, {**names, "down_proj": "dense_4h_to_h"})


def per_expert(tensors: Tensors) -> Tensors:
    """Replace stacked experts by modules of each."""
    made = {}
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        if not path.endswith(".experts"):
            made[name] = tensor
            continue
        for index, matrix in enumerate(tensor):
            modules = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for module, part in zip(modules, matrix.chunk(len(modules)), strict=True):
                made[f"{path}.{index}.{module}.weight"] = part
    return made


def deepseek(tensors: Tensors, config: Any) -> Tensors:
    made = renamed(
        tensors,
        {
            "block_sparse_moe.": "mlp.",
            "mlp.router.": "mlp.gate.",
            "shared_mlp.": "mlp.shared_experts.",
        },
    )
    for name in [name for name in made if name.endswith("input_linear.weight")]:
        for module, part in zip(("gate_proj", "up_proj"), made[name].chunk(2), strict=True):
            made[name.replace("input_linear", module)] = part
        del made[name]
    return per_expert(renamed(made, {"output_linear": "down_proj"}))


def bailing(tensors: Tensors, config: Any) -> Tensors:
    tensors = merged(deepseek(tensors, config), ("q_proj", "k_proj", "v_proj"), "query_key_value")
    names = {
        "embed_tokens": "word_embeddings",
        "self_attn.": "attention.",
        "o_proj": "dense",
        "q_norm": "query_layernorm",
    }
    return renamed(
        tensors, {**names, "k_norm": "key_layernorm", "e_score_correction_bias": "expert_bias"}
    )


def same(tensors: Tensors, config: Any) -> Tensors:
    return tensors


GPT_SIZES = {
    "n_layer": LAYERS,
    "n_head": HEADS,
    "hidden_size": HIDDEN,
    "seq_length": 64,
    "layer_norm_epsilon": 1e-6,
}
LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": DIM**-0.5}
GLM = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "kv_channels": DIM,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "padded_vocab_size": VOCAB,
    "seq_length": 64,
    "layernorm_epsilon": 1.5625e-07,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "rope_ratio": 0.5,
    "rmsnorm": True,
}

SOME_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
GROUPS = {
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": WIDTH,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
Case = tuple[str, dict[str, Any], dict[str, Any], Layout]
TWINS: dict[str, Case] = {
    "AquilaForCausalLM": ("llama", {}, LLAMA, same),
    "InternLMForCausalLM": (
        "llama",
        {"attention_bias": True, **ALL_HEADS},
        {**LLAMA, **ALL_HEADS, "bias": True},
        same,
    ),
    "InternLM2ForCausalLM": ("llama", {}, {**LLAMA, "bias": False}, internlm2),
    "InternLM3ForCausalLM": (
        "qwen2",
        {},
        {**LLAMA, "model_type": "internlm3", "qkv_bias": True, "bias": False},
        same,
    ),
    "MiMoForCausalLM": ("qwen2", {}, {**LLAMA, "model_type": "mimo", "attention_bias": True}, same),
    "Fairseq2LlamaForCausalLM": ("llama", {}, LLAMA, fairseq2),
    "BaichuanForCausalLM": ("llama", ALL_HEADS, {**LLAMA, **ALL_HEADS}, baichuan),
    "QWenLMHeadModel": (
        "qwen2",
        ALL_HEADS,
        {
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "kv_channels": DIM,
            "seq_length": 64,
            "layer_norm_epsilon": 1e-6,
            "rotary_emb_base": 10000,
            "no_bias": True,
            "use_logn_attn": True,
            "use_dynamic_ntk": True,
        },
        qwen,
    ),
    "TeleChat2ForCausalLM": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        {**GPT_SIZES, "ffn_hidden_size": WIDTH, "num_key_value_heads": 2},
        telechat,
    ),
    "TeleFLMForCausalLM": (
        "granite",
        {**GRANITE, "logits_scaling": 4.0},
        {**LLAMA, "use_mup": True, "input_mult": 3.0, "output_mult": 0.5, "mup_scale_factor": 2.0},
        same,
    ),
    "MiniCPMForCausalLM": (
        "granite",
        {**GRANITE, "residual_multiplier": 0.8 / math.sqrt(LAYERS), "logits_scaling": 2.0},
        {
            **LLAMA,
            "scale_emb": 3.0,
            "scale_depth": 0.8,
            "dim_model_base": HIDDEN // 2,
            "tie_word_embeddings": False,
        },
        same,
    ),
    "ChatGLMModel": (
        "glm",
        {"head_dim": DIM, "rope_parameters": {"rope_theta": 5000.0}},
        GLM,
        chatglm,
    ),
    "ExaoneForCausalLM": (
        "llama",
        {},
        {
            "hidden_size": HIDDEN,
            "intermediate_size": WIDTH,
            "num_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "layer_norm_epsilon": 1e-6,
            "activation_function": "silu",
        },
        exaone,
    ),
    "DeepseekForCausalLM": (
        "granitemoeshared",
        {**SOME_EXPERTS, "attention_multiplier": DIM**-0.5, "shared_intermediate_size": 2 * WIDTH},
        {
            **LLAMA,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": WIDTH,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "moe_layer_freq": 1,
            "scoring_func": "softmax",
        },
        deepseek,
    ),
    "BailingMoeForCausalLM": (
        "granitemoeshared",
        {**SOME_EXPERTS, "attention_multiplier": DIM**-0.5, "shared_intermediate_size": WIDTH},
        {
            **LLAMA,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": WIDTH,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "use_bias": False,
            "use_qkv_bias": False,
        },
        bailing,
    ),
    "BailingMoeV2ForCausalLM": (
        "glm4_moe",
        {
            **GROUPS,
            "n_routed_experts": 8,
            "use_qk_norm": True,
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-6,
            "head_dim": DIM,
        },
        {
            **LLAMA,
            **GROUPS,
            "num_experts": 8,
            "num_shared_experts": 1,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        bailing,
    ),
    "OrionForCausalLM": (
        "stablelm",
        {"partial_rotary_factor": 1.0, "layer_norm_eps": 1e-6},
        LLAMA,
        same,
    ),
}


def write_checkpoint(
    directory: Path, architecture: str, config: Mapping[str, Any], tensors: Tensors
) -> Path:
    directory.mkdir(exist_ok=True)
    ids = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
    told = {"architectures": [architecture], "model_type": "custom", **ids, **config}
    (directory / "config.json").write_text(json.dumps(told), "utf-8")
    save_file(
        {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


def write_twin(write: Any, name: str, directory: Path) -> Any:
    """Write the checkpoint of a family. Return its reference."""
    model_type, values, config, layout = TWINS[name]
    twin = write(model_type, **{"tie_word_embeddings": False, **values})
    if layout is telechat:
        for key, parameter in twin.model.named_parameters():
            if key.endswith(".bias") and not key.endswith(("o_proj.bias", "down_proj.bias")):
                parameter.data.zero_()
    tensors = layout(dict(twin.model.state_dict()), twin.model.config)
    twin.directory = write_checkpoint(directory, name, config, tensors)
    return twin


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TWINS)
def test_twin(
    write: Any, check_parity: Any, check_recorded: Any, name: str, tmp_path: Path
) -> None:
    twin = write_twin(write, name, tmp_path / "family")
    check_parity(twin)
    check_recorded(twin)


class Formulas:
    """A decoder in plain torch over whole texts, under Llama's names. bias: slopes of position
    biases; else it rotates. layers: (KV heads, width) of each. skips: (from, to, share)."""

    def __init__(
        self, tensors: Tensors, layers: list[tuple[int, int]], slopes: list[float], skips: list[Any]
    ) -> None:
        self.tensors = tensors
        self.layers = layers
        self.slopes = slopes
        self.skips = skips

    def norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (HIDDEN,), self.tensors[f"{name}.weight"], 1e-6)

    def turned(self, x: Tensor) -> Tensor:
        if self.slopes:
            return x
        angles = torch.arange(len(x))[:, None, None] * 10000.0 ** (
            -torch.arange(DIM // 2) / (DIM // 2)
        )
        first, second = x.chunk(2, -1)
        return torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ],
            -1,
        )

    def attention(self, at: str, x: Tensor, num_kv_heads: int) -> Tensor:
        q, k, v = (
            (x @ self.tensors[f"{at}{name}_proj.weight"].T).unflatten(1, (-1, DIM))
            for name in "qkv"
        )
        q = self.turned(q)
        k = self.turned(k)
        k, v = (part.repeat_interleave(HEADS // num_kv_heads, 1) for part in (k, v))
        out = attended(q, k, v, self.slopes, DIM**-0.5)
        return out @ self.tensors[f"{at}o_proj.weight"].T

    def __call__(self, ids: Tensor) -> Any:
        x = self.tensors["model.embed_tokens.weight"][ids[0]]
        inputs = []
        for index, (num_kv_heads, width) in enumerate(self.layers):
            inputs.append(x)
            for start, to, share in self.skips:
                if to == index:
                    x = inputs[start] * share + x * (1 - share)
            at = f"model.layers.{index}."
            if num_kv_heads:
                x = x + self.attention(
                    f"{at}self_attn.", self.norm(f"{at}input_layernorm", x), num_kv_heads
                )
            if width:
                y = self.norm(f"{at}post_attention_layernorm", x)
                gate, up, down = (
                    self.tensors[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
                )
                x = x + (functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        return SimpleNamespace(
            logits=(self.norm("model.norm", x) @ self.tensors["lm_head.weight"].T)[None]
        )


class Looped(Formulas):
    """The layers run several times and normalize what their blocks return. Each time, the last norm
    follows."""

    passes = 3

    def __call__(self, ids: Tensor) -> Any:
        x = self.tensors["model.embed_tokens.weight"][ids[0]]
        for _ in range(self.passes):
            for index, (num_kv_heads, _) in enumerate(self.layers):
                at = f"model.layers.{index}."
                mixed = self.attention(
                    f"{at}self_attn.", self.norm(f"{at}input_layernorm", x), num_kv_heads
                )
                x = x + self.norm(f"{at}input_layernorm_2", mixed)
                y = self.norm(f"{at}post_attention_layernorm", x)
                gate, up, down = (
                    self.tensors[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
                )
                x = x + self.norm(
                    f"{at}post_attention_layernorm_2",
                    (functional.silu(y @ gate.T) * (y @ up.T)) @ down.T,
                )
            x = self.norm("model.norm", x)
        return SimpleNamespace(logits=(x @ self.tensors["lm_head.weight"].T)[None])


def attended(q: Tensor, k: Tensor, v: Tensor, slopes: list[float], scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    distance = torch.arange(len(q))[None, :] - torch.arange(len(q))[:, None]
    if slopes:
        scores = scores + torch.tensor(slopes)[:, None, None] * distance
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(distance > 0, -math.inf).softmax(-1), v
    ).flatten(1)


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: t * 1.2 / t.shape[-1] ** 0.5 if t.dim() > 1 else 1 + 0.1 * t
        for name, t in made.items()
    }


def llama_shapes(layers: list[tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (HIDDEN,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    for i, (num_kv_heads, width) in enumerate(layers):
        at = f"model.layers.{i}."
        kv = num_kv_heads * DIM
        own = (
            {
                "input_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HEADS * DIM, HIDDEN),
                "self_attn.k_proj": (kv, HIDDEN),
                "self_attn.v_proj": (kv, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * DIM),
            }
            if kv
            else {}
        )
        own |= (
            {
                "post_attention_layernorm": (HIDDEN,),
                "mlp.gate_proj": (width, HIDDEN),
                "mlp.up_proj": (width, HIDDEN),
                "mlp.down_proj": (HIDDEN, width),
            }
            if width
            else {}
        )
        shapes |= {f"{at}{name}.weight": shape for name, shape in own.items()}
    return shapes


def block(group: int, factor: float, **no_op: bool) -> dict[str, Any]:
    return {
        "attention": {
            "n_heads_in_group": group,
            "no_op": no_op.get("attention", False),
            "replace_with_linear": False,
        },
        "ffn": {"ffn_mult": factor, "no_op": no_op.get("ffn", False), "replace_with_linear": False},
    }


DECI = [
    block(2, 2.0),
    block(1, 1.0, attention=True),
    block(4, 13.0),
    block(2, 1.0, ffn=True),
    block(2, 2.0),
]
FORMULAS: dict[
    str, tuple[dict[str, Any], list[tuple[int, int]], list[float], list[Any], Layout]
] = {
    "BaiChuanForCausalLM": (
        {**LLAMA, **ALL_HEADS, "max_position_embeddings": None, "model_max_length": 64},
        [(HEADS, WIDTH)] * LAYERS,
        [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8],
        [],
        baichuan,
    ),
    "SolarForCausalLM": (
        {
            **LLAMA,
            "num_hidden_layers": 5,
            "bskcn_1": [0, 2],
            "bskcn_2": [1],
            "bskcn_3": [1, 4],
            "bskcn_4": [3],
            "bskcn_tv": [0.9, 0.8],
        },
        [(2, WIDTH)] * 5,
        [],
        [(0, 1, 0.8), (2, 4, 0.8), (1, 3, 0.8)],
        same,
    ),
    "DeciLMForCausalLM": (
        {
            **LLAMA,
            "num_hidden_layers": 5,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "block_configs": DECI,
        },
        [(2, 256), (0, 256), (1, 512), (2, 0), (2, 256)],
        [],
        [],
        same,
    ),
}


def write_formulas(name: str, directory: Path) -> Any:
    """Write one of FORMULAS. Return its reference."""
    config, layers, slopes, skips, layout = FORMULAS[name]
    tensors = random_tensors(llama_shapes(layers))
    given = {key: value for key, value in config.items() if value is not None}
    write_checkpoint(directory, name, given, layout(tensors, None))
    return reference_of(directory, Formulas(tensors, layers, slopes, skips))


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(check_parity: Any, check_recorded: Any, name: str, tmp_path: Path) -> None:
    reference = write_formulas(name, tmp_path / "model")
    check_parity(reference)
    check_recorded(reference)


def reference_of(directory: Path, model: Callable[[Tensor], Any]) -> Any:
    def logprobs(token_ids: list[int]) -> Tensor:
        logits: Tensor = model(torch.tensor([list(token_ids)])).logits[0]
        return logits.log_softmax(-1)

    return SimpleNamespace(directory=directory, logprobs=logprobs)


def write_jais(directory: Path) -> Any:
    """GPT-2's names and stored matrices, SwiGLU, position biases, and scores divided by the size of
    a head."""
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (VOCAB, HIDDEN)}
    norms = [
        "transformer.ln_f",
        *(f"transformer.h.{i}.{name}" for i in range(LAYERS) for name in ("ln_1", "ln_2")),
    ]
    shapes |= {f"{name}.{kind}": (HIDDEN,) for name in norms for kind in ("weight", "bias")}
    sizes = {
        "attn.c_attn": (HIDDEN, 3 * HIDDEN),
        "attn.c_proj": (HIDDEN, HIDDEN),
        "mlp.c_fc": (HIDDEN, WIDTH),
    }
    for name, size in {
        **sizes,
        "mlp.c_fc2": (HIDDEN, WIDTH),
        "mlp.c_proj": (WIDTH, HIDDEN),
    }.items():
        shapes |= {f"transformer.h.{i}.{name}.weight": size for i in range(LAYERS)}
        shapes |= {f"transformer.h.{i}.{name}.bias": size[1:] for i in range(LAYERS)}
    tensors = random_tensors(shapes)
    config = {
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_inner": WIDTH,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "swiglu",
        "position_embedding_type": "alibi",
        "mup_scale_qk_dot_by_d": True,
        "mup_embeddings_scale": 4.0,
        "mup_output_alpha": 2.0,
        "mup_width_scale": 0.25,
        "tie_word_embeddings": True,
    }

    def product(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x, (HIDDEN,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-5
        )

    def model(ids: Tensor) -> Any:
        x = tensors["transformer.wte.weight"][ids[0]] * 4
        for i in range(LAYERS):
            at = f"transformer.h.{i}."
            q, k, v = (
                product(f"{at}attn.c_attn", norm(f"{at}ln_1", x))
                .unflatten(1, (3, HEADS, DIM))
                .unbind(1)
            )
            x = x + product(
                f"{at}attn.c_proj", attended(q, k, v, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], 1 / DIM)
            )
            y = norm(f"{at}ln_2", x)
            x = x + product(
                f"{at}mlp.c_proj",
                product(f"{at}mlp.c_fc", y) * functional.silu(product(f"{at}mlp.c_fc2", y)),
            )
        return SimpleNamespace(
            logits=(norm("transformer.ln_f", x) @ tensors["transformer.wte.weight"].T * 0.5)[None]
        )

    write_checkpoint(directory, "JAISLMHeadModel", config, tensors)
    return reference_of(directory, model)


def test_jais(check_parity: Any, check_recorded: Any, tmp_path: Path) -> None:
    reference = write_jais(tmp_path / "model")
    check_parity(reference)
    check_recorded(reference)


def write_ouro(directory: Path) -> Any:
    """The unused gate is in the checkpoint."""
    layers = [(2, WIDTH)] * 2
    norms = [
        f"model.layers.{i}.{name}_layernorm_2.weight"
        for i in range(2)
        for name in ("input", "post_attention")
    ]
    tensors = random_tensors({**llama_shapes(layers), **dict.fromkeys(norms, (HIDDEN,))})
    gate = {
        "model.early_exit_gate.weight": torch.ones(1, HIDDEN),
        "model.early_exit_gate.bias": torch.ones(1),
    }
    config = {
        **LLAMA,
        "num_hidden_layers": 2,
        "total_ut_steps": Looped.passes,
        "early_exit_threshold": 1.0,
    }
    write_checkpoint(directory, "OuroForCausalLM", config, {**tensors, **gate})
    return reference_of(directory, Looped(tensors, layers, [], []))


def test_ouro(check_parity: Any, check_cached: Any, check_recorded: Any, tmp_path: Path) -> None:
    """Its passes have KV caches of their own, also when they are preempted and cached."""
    reference = write_ouro(tmp_path / "model")
    check_parity(reference)
    check_parity(reference, lengths=(3, 20, 40, 33), num_gpu_blocks_override=27, max_model_len=56)
    check_cached(reference, (37, 30, 13))
    check_recorded(reference)
