"""Models whose tensors GGUF files have in another form than checkpoints on Hugging Face: experts
and merged projections are taken apart, and decays of states are stored as they are used. Each
layout follows llama.cpp's converter of the architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]
RMS = "attention.layer_norm_rms_epsilon"


@dataclass(frozen=True)
class Layout:
    """A model. arch: of the file. model_type, config: of a model of transformers that computes the
    same. tensors: (tensors, config) → tensors by the names of the file. metadata: config → keys of
    the architecture. numbers: tensors → whole keys of numbers that are tensors in a checkpoint."""

    arch: str
    model_type: str
    config: Mapping[str, Any]
    tensors: Callable[[Tensors, Any], Tensors]
    metadata: Callable[[Any], dict[str, Any]] = field(default=lambda config: {})
    numbers: Callable[[Tensors], dict[str, list[float]]] = field(default=lambda tensors: {})


def in_file(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Returns the tensors under the names of GGUF. names: GGUF names of modules by those of
    transformers, which are without the number of the layer."""
    made = {}
    for name, tensor in tensors.items():
        path, _, ending = name.rpartition(".")
        path, ending = (path, ending) if ending in ("weight", "bias") else (name, "weight")
        number, _, module = path.partition(".layers.")[2].partition(".")
        made[f"blk.{number}.{names[module]}.{ending}" if module else f"{names[path]}.{ending}"] = (
            tensor
        )
    return made


def replaced(
    tensors: Tensors, ending: str, parts: Callable[[Tensor], dict[str, Tensor]]
) -> Tensors:
    """Replaces each tensor whose name ends like this by its parts, by their endings."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(ending):
            made |= {
                name.removesuffix(ending) + part: value for part, value in parts(tensor).items()
            }
        else:
            made[name] = tensor
    return made


def in_pairs(tensors: Tensors, config: Any) -> Tensors:
    """Returns the tensors with the rows of Q and K in pairs."""
    heads = {
        ".q_proj.weight": config.num_attention_heads,
        ".k_proj.weight": config.num_key_value_heads,
    }
    for ending, count in heads.items():
        tensors = replaced(
            tensors,
            ending,
            lambda t, e=ending, n=count: {
                e: t.view(n, 2, len(t) // n // 2, -1).transpose(1, 2).reshape(t.shape)
            },
        )
    return tensors


TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ATTENTION = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
EXPERTS = {f"experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")}


def gpt_oss(tensors: Tensors, config: Any) -> Tensors:
    def apart(first: Tensor) -> dict[str, Tensor]:
        return {"gate_proj.weight": first.mT[:, ::2], "up_proj.weight": first.mT[:, 1::2]}

    tensors = replaced(tensors, "gate_up_proj", apart)
    tensors = replaced(
        tensors,
        "gate_up_proj_bias",
        lambda t: {"gate_proj.bias": t[:, ::2], "up_proj.bias": t[:, 1::2]},
    )
    tensors = replaced(tensors, "experts.down_proj", lambda t: {"experts.down_proj.weight": t.mT})
    tensors = replaced(tensors, "down_proj_bias", lambda t: {"down_proj.bias": t})
    names = {
        **TOP,
        **ATTENTION,
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.sinks": "attn_sinks",
    }
    return in_file(
        tensors,
        {
            **names,
            "mlp.router": "ffn_gate_inp",
            **{f"mlp.{name}": to for name, to in EXPERTS.items()},
        },
    )


def halves(tensor: Tensor) -> dict[str, Tensor]:
    return dict(zip(("gate_proj.weight", "up_proj.weight"), tensor.chunk(2, -2), strict=True))


def stacked(tensors: Tensors) -> Tensors:
    """Returns the tensors with gate and up of all experts apart."""
    tensors = replaced(
        tensors,
        "experts.gate_up_proj",
        lambda t: {f"experts.{key}": part for key, part in halves(t).items()},
    )
    return replaced(tensors, "experts.down_proj", lambda t: {"experts.down_proj.weight": t})


def granite(tensors: Tensors, config: Any) -> Tensors:
    """Also of the first Ling, which calls its modules otherwise on Hugging Face, but not in
    files."""
    tensors = stacked(in_pairs(tensors, config))
    tensors = replaced(tensors, "input_linear.weight", halves)
    names = {"router": "ffn_gate_inp", **EXPERTS}
    shared = {
        "gate_proj": "ffn_gate_shexp",
        "up_proj": "ffn_up_shexp",
        "output_linear": "ffn_down_shexp",
    }
    names = {f"block_sparse_moe.{name}": to for name, to in names.items()} | {
        f"shared_mlp.{name}": to for name, to in shared.items()
    }
    return in_file(tensors, {**TOP, **ATTENTION, **names})


def bailing2(tensors: Tensors, config: Any) -> Tensors:
    made = stacked(tensors)
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        parts = [made.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        made[name.replace("q_proj", "qkv")] = torch.cat(parts)
    made = replaced(made, "e_score_correction_bias", lambda t: {"correction.bias": t})
    names = {
        "self_attn.qkv": "attn_qkv",
        "mlp.gate.correction": "exp_probs_b",
        "mlp.gate": "ffn_gate_inp",
    }
    for part in ("gate", "up", "down"):
        names |= {
            f"mlp.{part}_proj": f"ffn_{part}",
            f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp",
        }
    return in_file(
        made, {**TOP, **ATTENTION, **names, **{f"mlp.{name}": to for name, to in EXPERTS.items()}}
    )


def llama4(tensors: Tensors, config: Any) -> Tensors:
    turned = {name: t.mT if t.dim() == 3 else t for name, t in tensors.items()}
    tensors = stacked(turned)
    block = {"router": "ffn_gate_inp", **EXPERTS}
    for part in ("gate", "up", "down"):
        block |= {f"{part}_proj": f"ffn_{part}", f"shared_expert.{part}_proj": f"ffn_{part}_shexp"}
    return in_file(
        tensors, {**TOP, **ATTENTION, **{f"feed_forward.{name}": to for name, to in block.items()}}
    )


def under_the_same_names(tensors: Tensors, config: Any) -> Tensors:
    """Of families that compute what another one does."""
    return in_file(
        tensors,
        {
            **TOP,
            **ATTENTION,
            **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        },
    )


def apertus(tensors: Tensors, config: Any) -> Tensors:
    names = {
        "attention_layernorm": "attn_norm",
        "feedforward_layernorm": "ffn_norm",
        "mlp.up_proj": "ffn_up",
    }
    kept = {name: tensor for name, tensor in tensors.items() if ".act_fn." not in name}
    return in_file(kept, {**TOP, **ATTENTION, **names, "mlp.down_proj": "ffn_down"})


def xielu(tensors: Tensors) -> dict[str, list[float]]:
    names = ("alpha_p", "alpha_n", "beta")
    return {
        f"xielu.{name}": [t.item() for key, t in tensors.items() if key.endswith(f".act_fn.{name}")]
        for name in names
    }


def counts(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
    }


SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def scales(config: Any) -> dict[str, Any]:
    return {key: float(getattr(config, name)) for name, key in SCALES.items()}


GRANITE = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "rms_norm_eps": 0.01,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1500.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
LAYOUTS = {
    "gpt-oss": Layout(
        "gpt-oss",
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "rope_parameters": YARN,
        },
        gpt_oss,
        lambda config: {
            **counts(config),
            "attention.sliding_window": 9,
            "expert_feed_forward_length": config.intermediate_size,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "granitemoe": Layout(
        "granitemoe",
        "granitemoe",
        GRANITE,
        granite,
        lambda config: {**counts(config), **scales(config)},
    ),
    "granitemoe, shared expert": Layout(
        "granitemoe",
        "granitemoeshared",
        {**GRANITE, "shared_intermediate_size": 40},
        granite,
        lambda config: {
            **counts(config),
            **scales(config),
            "expert_shared_feed_forward_length": 40,
        },
    ),
    "deepseek": Layout(
        "deepseek",
        "granitemoeshared",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_multiplier": 8**-0.5,
            "shared_intermediate_size": 96,
        },
        granite,
        lambda config: {
            **counts(config),
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "leading_dense_block_count": 0,
        },
    ),
    "bailingmoe": Layout(
        "bailingmoe",
        "granitemoeshared",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_multiplier": 8**-0.5,
            "shared_intermediate_size": 96,
        },
        granite,
        lambda config: {
            **counts(config),
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
        },
    ),
    "bailingmoe2": Layout(
        "bailingmoe2",
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "n_shared_experts": 1,
            "head_dim": 16,
        },
        bailing2,
        lambda config: {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "rope.dimension_count": 8,
            "expert_shared_feed_forward_length": 32,
        },
    ),
    "orion": Layout(
        "orion",
        "stablelm",
        {"partial_rotary_factor": 1.0, "layer_norm_eps": 1e-3},
        under_the_same_names,
        lambda config: {"attention.layer_norm_epsilon": config.layer_norm_eps},
    ),
    "pangu-embedded": Layout(
        "pangu-embedded", "llama", {"attention_bias": True}, under_the_same_names
    ),
    "apertus": Layout(
        "apertus",
        "apertus",
        {"attention_bias": True, "rope_parameters": PLAIN_ROPE},
        apertus,
        numbers=xielu,
    ),
    "llama4": Layout(
        "llama4",
        "llama4_text",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
            "rms_norm_eps": 1e-3,
        },
        llama4,
        lambda config: {
            **counts(config),
            "expert_feed_forward_length": config.intermediate_size,
            "feed_forward_length": 64,
            "interleave_moe_layer_step": 2,
        },
    ),
}


def write_layout(
    reference: Any,
    layout: Layout,
    path: Path,
    stored: Literal["F32", "Q8_0", "values of Q8_0"] = "F32",
) -> None:
    """Writes the model of `reference` to a GGUF file. stored: the type of its matrices, but those
    of routers and norms."""
    config = reference.model.config
    heads = getattr(config, "num_attention_heads", None) or 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    eps = next(
        getattr(config, name)
        for name in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
        if hasattr(config, name)
    )
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 0,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        RMS: eps,
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        **layout.metadata(config),
    }
    writer = gguf.GGUFWriter(path, layout.arch)
    for key, value in metadata.items():
        kind = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        kind[type(value)](f"{layout.arch}.{key}", value)
    for key, values in layout.numbers(dict(reference.model.state_dict())).items():
        writer.add_array(key, values)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == layout.arch)
    known = {
        gguf.TENSOR_NAMES[kind].format(bid=i)
        for kind in gguf.MODEL_TENSORS[number]
        for i in range(99)
    }
    tied = config.tie_word_embeddings
    for name, tensor in layout.tensors(dict(reference.model.state_dict()), config).items():
        if name == "output.weight" and tied:
            continue
        assert name.rpartition(".")[0] in known or name in known, (
            f"the package does not know {name}"
        )
        values = np.ascontiguousarray(tensor.float().numpy())
        is_plain = (
            values.ndim < 2
            or values.shape[-1] % 32
            or any(part in name for part in ("norm", "bias", "gate_inp"))
        )
        kind = gguf.GGMLQuantizationType["F32" if is_plain or stored == "F32" else "Q8_0"]
        packed = values if kind.name == "F32" else gguf.quants.quantize(values, kind)
        if stored == "values of Q8_0" and not is_plain:
            packed = gguf.quants.dequantize(packed, kind)
            kind = gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
