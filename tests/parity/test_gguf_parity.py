"""Tiny models of transformers, converted to GGUF as the format defines it: the loader gives back
their configurations and tensors, and the tokens are those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_layouts import LAYOUTS, write_layout
from gguf_states import STATES
from pegboard_pack_gguf.dequantize import dequantize_into
from pegboard_pack_gguf.loader import GGUFLoader
from pegboard_pack_gguf.tables import ARCHITECTURES
from pegboard_pack_gguf.unserved import UNSERVED
from safetensors.torch import load_file
from transformers import AutoConfig

from pegboard import SamplingParams
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import WantedWeight, WeightLoaderSetup

LOADER = GGUFLoader(None, WeightLoaderSetup())
RMS = "attention.layer_norm_rms_epsilon"
LAYER_NORM = "attention.layer_norm_epsilon"
GPT2 = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 96,
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        )
    ),
}
WIDE = {"hidden_size": 64, "intermediate_size": 256, "num_key_value_heads": None}
FALCON = {**WIDE, "ffn_hidden_size": 256, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1}
GROUPS = {"new_decoder_architecture": True, "multi_query": False, "num_kv_heads": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Case:
    """A model. config: of transformers. metadata: GGUF keys beyond those that all models have, by
    attribute of the config. rotated: the part of each head that is. permuted: the converter
    permutes Q and K. norm_offset: it adds this to norm weights. by_head: it takes Q, K and V of the
    KV heads apart. transposed: it transposes all matrices but the embeddings. sizes: metadata that
    follow from the config. splits_up: it stores the matrix that makes keys and values of latent
    vectors in two."""

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=lambda: {"rms_norm_eps": RMS})
    rotated: float | None = None
    permuted: bool = False
    norm_offset: float = 0.0
    by_head: bool = False
    transposed: bool = False
    sizes: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    splits_up: bool = False


WINDOWS = {
    "sliding_window": 9,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
WINDOW = {"rms_norm_eps": RMS, "sliding_window": "attention.sliding_window"}
SCALES = {
    "rms_norm_eps": RMS,
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
CHOSEN = {
    "rms_norm_eps": RMS,
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
ROUTED = {
    "rms_norm_eps": RMS,
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
LATENT_ROUTED = {
    **ROUTED,
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}
MANY = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **MANY,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}


def cached_sizes(config: Any) -> dict[str, Any]:
    """Sizes as newer files have them: those of the cache under the usual names."""
    rope_dim = config.qk_rope_head_dim
    rank = config.kv_lora_rank
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rope_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rope_dim,
    }


def head_sizes(config: Any) -> dict[str, Any]:
    """Sizes as older files have them."""
    of_head = {"attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim}
    return {
        **of_head,
        "attention.value_length": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


CASES = {
    "llama": Case("llama", permuted=True),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3", {"head_dim": 32}),
    "gemma": Case("gemma", {"head_dim": 16}, norm_offset=1.0),
    "gemma2": Case(
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 9,
            "attn_logit_softcapping": 5.0,
        },
        {
            **WINDOW,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        norm_offset=1.0,
    ),
    "gemma3": Case(
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9, "num_hidden_layers": 6},
        WINDOW,
        norm_offset=1.0,
    ),
    "phi2": Case(
        "phi", {"partial_rotary_factor": 0.5}, {"layer_norm_eps": LAYER_NORM}, rotated=0.5
    ),
    "phi3": Case("phi3", {"sliding_window": 13}, WINDOW),
    "gpt2": Case("gpt2", GPT2, {"layer_norm_epsilon": LAYER_NORM}, transposed=True),
    "starcoder": Case("gpt_bigcode", GPT2, {"layer_norm_epsilon": LAYER_NORM}),
    "starcoder2": Case("starcoder2", {}, {"norm_epsilon": LAYER_NORM}),
    "gptneox": Case(
        "gpt_neox",
        {
            "partial_rotary_factor": 0.25,
            "num_key_value_heads": None,
            "use_parallel_residual": False,
        },
        {"layer_norm_eps": LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        rotated=0.25,
        by_head=True,
    ),
    "falcon": Case("falcon", FALCON, {"layer_norm_epsilon": LAYER_NORM}, by_head=True),
    "falcon with groups": Case(
        "falcon", {**FALCON, **GROUPS}, {"layer_norm_epsilon": LAYER_NORM}, by_head=True
    ),
    "falcon with two norms": Case(
        "falcon",
        {**FALCON, **GROUPS, "num_ln_in_parallel_attn": 2},
        {"layer_norm_epsilon": LAYER_NORM},
        by_head=True,
    ),
    "bloom": Case(
        "bloom", {**WIDE, "seq_length": 64}, {"layer_norm_epsilon": LAYER_NORM}, by_head=True
    ),
    "mpt": Case(
        "mpt",
        {**WIDE, "max_seq_len": 64, "attn_config": {"clip_qkv": 0.5}},
        {"layer_norm_epsilon": LAYER_NORM},
        sizes=lambda config: {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.5},
    ),
    "stablelm": Case(
        "stablelm",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-3},
        {"layer_norm_eps": LAYER_NORM},
        rotated=0.25,
    ),
    "stablelm with parallel blocks": Case(
        "stablelm",
        {"use_parallel_residual": True, "partial_rotary_factor": 0.5},
        {"layer_norm_eps": LAYER_NORM},
        rotated=0.5,
    ),
    "command-r": Case(
        "cohere",
        {"use_qk_norm": True},
        {"layer_norm_eps": LAYER_NORM, "logit_scale": "logit_scale"},
    ),
    "cohere2": Case(
        "cohere2",
        WINDOWS,
        {
            "layer_norm_eps": LAYER_NORM,
            "logit_scale": "logit_scale",
            "sliding_window": "attention.sliding_window",
        },
    ),
    "granite": Case("granite", MULTIPLIERS, SCALES, permuted=True),
    "olmo": Case("olmo", {"clip_qkv": 2.0}, {"clip_qkv": "attention.clamp_kqv"}, permuted=True),
    "olmo2": Case("olmo2"),
    "olmo2 with windows": Case("olmo3", WINDOWS, WINDOW),
    "nemotron": Case(
        "nemotron",
        {"partial_rotary_factor": 0.5},
        {"norm_eps": LAYER_NORM},
        rotated=0.5,
        norm_offset=1.0,
    ),
    "jais2": Case("jais2", {}, {"layer_norm_eps": LAYER_NORM}),
    "smollm3": Case("smollm3", {"num_hidden_layers": 4}, permuted=True),
    "glm4": Case("glm4", {"head_dim": 16}, rotated=0.5),
    "chatglm": Case("glm", {"head_dim": 16}, rotated=0.5),
    "exaone4": Case("exaone4", WINDOWS, WINDOW),
    "arcee": Case("arcee", permuted=True),
    "ernie4_5": Case("ernie4_5", {"head_dim": 16}),
    "seed_oss": Case("seed_oss", {"head_dim": 16}),
    "hunyuan-dense": Case("hunyuan_v1_dense", {"head_dim": 16}),
    "bitnet": Case("bitnet", {"tie_word_embeddings": True}),
    "llama with experts": Case(
        "mixtral",
        {"num_local_experts": 4},
        {
            "rms_norm_eps": RMS,
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
        },
        permuted=True,
    ),
    "qwen2moe": Case(
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        {
            "rms_norm_eps": RMS,
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
    "qwen3moe": Case(
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {
            "rms_norm_eps": RMS,
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
    ),
    "olmoe": Case("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": None}, CHOSEN),
    "deepseek2": Case(
        "deepseek_v2",
        {**LATENT, "topk_method": "greedy", "head_dim": 8},
        LATENT_ROUTED,
        sizes=cached_sizes,
        splits_up=True,
    ),
    "deepseek2 of older converters": Case(
        "deepseek_v2",
        {**LATENT, "topk_method": "greedy", "head_dim": 8},
        LATENT_ROUTED,
        sizes=head_sizes,
    ),
    "deepseek2 with corrections": Case(
        "deepseek_v3",
        {
            **LATENT,
            "n_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
        LATENT_ROUTED,
        sizes=lambda config: {
            **cached_sizes(config),
            "expert_gating_func": 2,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_log_multiplier": 0.07,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        },
        splits_up=True,
    ),
    "dots1": Case("dots1", {**MANY, "head_dim": 16}, ROUTED),
    "glm4moe": Case("glm4_moe", {**MANY, "head_dim": 16, "use_qk_norm": True}, ROUTED, rotated=0.5),
    "afmoe": Case(
        "afmoe",
        {
            **WINDOWS,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "head_dim": 16,
            "route_scale": 2.5,
            "mup_enabled": True,
        },
        {
            **CHOSEN,
            "moe_intermediate_size": "expert_feed_forward_length",
            "num_shared_experts": "expert_shared_count",
            "num_dense_layers": "leading_dense_block_count",
            "route_scale": "expert_weights_scale",
            "sliding_window": "attention.sliding_window",
        },
        sizes=lambda config: {"expert_gating_func": 2},
    ),
    "phimoe": Case(
        "phimoe",
        {"num_local_experts": 4},
        {
            "rms_norm_eps": RMS,
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
        },
    ),
    "minimax-m2": Case(
        "minimax_m2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
        {
            "rms_norm_eps": RMS,
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        rotated=0.5,
        sizes=lambda config: {"expert_gating_func": 2},
    ),
    "ernie4_5-moe": Case(
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
            "num_hidden_layers": 4,
        },
        {
            "rms_norm_eps": RMS,
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
    ),
    "hunyuan-moe": Case(
        "hunyuan_v1_moe",
        {"num_experts": 6, "moe_topk": 2, "head_dim": 16},
        {
            "rms_norm_eps": RMS,
            "num_experts": "expert_count",
            "moe_topk": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        sizes=lambda config: {
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": config.intermediate_size,
        },
    ),
}
NAMES = {
    ".attn_sub_norm.": ".inner_attn_ln.",
    ".ffn_sub_norm.": ".ffn_layernorm.",
    "e_score_correction_bias": "e_score_correction.bias",
    ".expert_bias": ".expert_bias.bias",
}
"""Names in transformers that the package knows by the names of another program."""
OTHER_LAYOUTS = {**LAYOUTS, **STATES}
SAME_TABLE = {"internlm2", "xverse", "exaone", "minicpm", "mistral3", "qwen2vl"}
"""Architectures without a case: transformers has no model of this name, or the table is that of
another one."""


def stored_order(name: str, values: np.ndarray, case: Case, heads: tuple[int, int]) -> np.ndarray:
    """Returns the values as the converter of the architecture stores them."""
    count, kv_count = heads
    if name.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")):
        return values.squeeze()
    if case.norm_offset and name.endswith("norm.weight"):
        return values + np.float32(case.norm_offset)
    if case.permuted and ".q_proj." in name or case.permuted and ".k_proj." in name:
        number = count if ".q_proj." in name else kv_count
        return (
            values.reshape(number, 2, len(values) // number // 2, -1)
            .swapaxes(1, 2)
            .reshape(values.shape)
        )
    if case.by_head and ".query_key_value." in name:
        of_head = values.reshape(
            kv_count, count // kv_count + 2, len(values) // (count + 2 * kv_count), -1
        )
        return np.concatenate(
            [each.reshape(-1, *values.shape[1:]) for each in np.split(of_head, (-2, -1), axis=1)]
        )
    if case.transposed and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return values.T
    return values


def write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kind = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    kind[type(value)](key, value)


def convert(
    reference: Any, name: str, case: Case, path: Path, stored: str = "F32"
) -> dict[str, torch.Tensor]:
    """Writes the model to `path`. Returns the values by the names of the checkpoint. stored: the
    type of its matrices."""
    arch = name.partition(" ")[0]
    config = reference.model.config
    tensors = {
        key: value.float()
        for key, value in load_file(reference.directory / "model.safetensors").items()
    }
    kind = gguf.GGMLQuantizationType[stored]
    table = gguf.get_tensor_name_map(
        next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == arch),
        config.num_hidden_layers,
    )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = (
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    )
    if getattr(config, "multi_query", False):
        heads = (heads[0], 1)
    elif getattr(config, "new_decoder_architecture", False):
        heads = (heads[0], config.num_kv_heads)
    writer = gguf.GGUFWriter(path, arch)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    ffn = getattr(config, "intermediate_size", None) or config.n_inner
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": ffn,
        "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * (case.rotated or 1.0)),
        **({"rope.freq_base": float(rope["rope_theta"])} if rope else {}),
        **{key: getattr(config, known) for known, key in case.metadata.items()},
        **case.sizes(config),
    }
    for key, value in metadata.items():
        write_value(writer, f"{arch}.{key}", value)
    values: dict[str, torch.Tensor] = {}
    stacked: dict[str, list[np.ndarray]] = {}
    for hf_name, tensor in tensors.items():
        is_matrix = (
            tensor.dim() == 2
            and "wpe" not in hf_name
            and tensor.shape[-1] % 32 == 0
            and "mlp.gate.weight" not in hf_name
        )
        order = stored_order(hf_name, tensor.numpy(), case, heads)
        known = hf_name
        if ".experts." in hf_name:
            before, _, after = hf_name.partition(".experts.")
            known = f"{before}.experts.{after.partition('.')[2]}"
        # as its converter does
        known = known.removeprefix("transformer.") if arch == "bloom" else known
        for own, of_package in NAMES.items():
            known = known.replace(own, of_package)
        if case.splits_up and ".kv_b_proj." in known:
            values[hf_name] = tensor
            heads_of = tensor.view(heads[0], -1, tensor.shape[1]).numpy()
            of_keys, of_values = np.split(heads_of, [config.qk_nope_head_dim], axis=1)
            for part, stored_part in (("k_b", of_keys.swapaxes(1, 2)), ("v_b", of_values)):
                found = table.get_name(known.replace("kv_b", part), try_suffixes=(".weight",))
                writer.add_tensor(str(found), np.ascontiguousarray(stored_part))
            continue
        found = table.get_name(known, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"the package has no name for {known}"
        values[hf_name] = tensor
        if ".experts." in hf_name:
            stacked.setdefault(found, []).append(order)
            continue
        if is_matrix and stored != "F32":
            packed = gguf.quants.quantize(np.ascontiguousarray(order), kind)
            writer.add_tensor(found, packed, raw_dtype=kind)
        else:
            writer.add_tensor(found, np.ascontiguousarray(order))
    for found, parts in stacked.items():
        writer.add_tensor(found, np.stack(parts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


IGNORED = {
    "architectures",
    "dtype",
    "transformers_version",
    "_name_or_path",
    "hidden_act",
    "initializer_range",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "head_dim",
    "intermediate_size",
    "hidden_size",
    "attn_implementation",
    "_sliding_window_pattern",
    "sliding_window_pattern",
    "max_window_layers",
    "embd_pdrop",
    "summary_type",
    "num_key_value_heads",
    "multi_query",
    "is_decoder",
}
"""Settings that a model does not use, or that follow from others that are compared."""


def described(path: Path) -> tuple[Any, Any]:
    checkpoint = LOADER.describe(LocalFiles(path))
    kind = checkpoint.config["model_type"]
    # its head_dim cannot be set
    computed = {"model_type", "head_dim"} if kind == "falcon" else {"model_type"}
    config = {key: value for key, value in checkpoint.config.items() if key not in computed}
    return checkpoint, AutoConfig.for_model(kind, **config)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_config_tensors_and_tokens(
    write: Callable[..., Any], check_parity: Callable[..., None], tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    reference = write(case.model_type, **{**SIZES, **case.config})
    values = convert(reference, name, case, tmp_path / "model.gguf")
    checkpoint, found = described(tmp_path / "model.gguf")
    expected, given = (each.to_dict() for each in (reference.model.config, found))
    for each in (expected, given):  # MPT has values of attention in an object
        each |= {
            f"attn_config.{key}": value
            for key, value in each.pop("attn_config", {}).items()
            if key not in IGNORED
        }
    differing = {
        key: (value, given.get(key))
        for key, value in expected.items()
        if key not in IGNORED and given.get(key) != value
    }
    assert not differing
    assert checkpoint.architectures == (type(reference.model).__name__,)
    assert {
        key for key in checkpoint.tensors if ".k_b_proj" not in key and ".v_b_proj" not in key
    } == set(values)
    for piece in LOADER.tensors(checkpoint, [WantedWeight(key) for key in values]):
        assert isinstance(piece.data, torch.Tensor)
        assert piece.data.shape == values[piece.name].shape == checkpoint.tensors[piece.name].shape
        if checkpoint.rope_style == "halves" or "_proj" not in piece.name:
            torch.testing.assert_close(
                piece.data, values[piece.name], rtol=0, atol=1e-6 if case.norm_offset else 0.0
            )
    check_parity(
        replace(reference, directory=tmp_path / "model.gguf"), (20,), kv_cache_dtype="float32"
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_tokens_of_other_layouts(
    write: Callable[..., Any], check_parity: Callable[..., None], tmp_path: Path, name: str
) -> None:
    layout = OTHER_LAYOUTS[name]
    reference = write(layout.model_type, **layout.config)
    write_layout(reference, layout, tmp_path / "model.gguf")
    check_parity(
        replace(reference, directory=tmp_path / "model.gguf"), (20, 7), kv_cache_dtype="float32"
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["gpt-oss", "granitemoe, shared expert", "bailingmoe", "qwen3next", "jamba"]
)
def test_blocks_of_other_layouts(
    write: Callable[..., Any], open_llm: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """Blocks that are cut, joined and moved mean the same as floats that are."""
    layout = OTHER_LAYOUTS[name]
    reference = write(layout.model_type, **layout.config)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    found = []
    for stored in ("Q8_0", "values of Q8_0"):
        write_layout(reference, layout, tmp_path / f"{stored}.gguf", stored)
        settings = {
            "plugin_options": {"quantization.gguf": {"compute": "float"}},
            "download_dir": str(tmp_path / "cache"),
        }
        with open_llm(tmp_path / f"{stored}.gguf", kv_cache_dtype="float32", **settings) as llm:
            (output,) = llm.generate(
                [{"prompt_token_ids": [*range(3, 23)]}], params, use_tqdm=False
            )
        rows = [row for row in output.prompt_logprobs or [] if row is not None]
        found.append(torch.tensor([[row[token].logprob for token in sorted(row)] for row in rows]))
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["granite", "gptneox", "gpt2", "starcoder", "olmo2"])
def test_rows_of_blocks(write: Callable[..., Any], tmp_path: Path, name: str) -> None:
    """Blocks are moved by rows as they are, or dequantized where the model stores columns."""
    case = CASES[name]
    reference = write(case.model_type, **{**SIZES, **case.config})
    values = convert(reference, name, case, tmp_path / "model.gguf", "Q8_0")
    checkpoint, _ = described(tmp_path / "model.gguf")
    kind = gguf.GGMLQuantizationType.Q8_0
    num_packed = 0
    for piece in LOADER.tensors(checkpoint, [WantedWeight(key) for key in values]):
        expected = values[piece.name].numpy()
        is_turned = case.transposed and ".c_" in piece.name
        if checkpoint.tensors[piece.name].stored == "Q8_0":
            expected = np.ascontiguousarray(expected.T if is_turned else expected)
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, kind), kind)
            expected = expected.T if is_turned else expected
        found = torch.empty(piece.shape) if isinstance(piece.data, memoryview) else piece.data
        if isinstance(piece.data, memoryview):
            dequantize_into(piece.data, "Q8_0", found)
            num_packed += 1
        assert np.array_equal(found.numpy(), expected), piece.name
    assert num_packed >= (1 if case.transposed else 8)


@pytest.mark.parametrize("name", ["gptneox", "falcon with two norms", "bloom"])
def test_blocks_of_merged_projections(
    write: Callable[..., Any], check_parity: Callable[..., None], tmp_path: Path, name: str
) -> None:
    """The loader and the model move rows of blocks. The results are those of the numbers that the
    blocks mean."""
    case = CASES[name]
    reference = write(case.model_type, **{**SIZES, **case.config})
    convert(reference, name, case, tmp_path / "model.gguf", "Q8_0")
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for parameter in reference.model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(
                    torch.from_numpy(
                        gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind)
                    )
                )
    settings = {
        "plugin_options": {"quantization.gguf": {"compute": "float"}},
        "download_dir": str(tmp_path / "cache"),
    }
    check_parity(
        replace(reference, directory=tmp_path / "model.gguf"),
        (20,),
        kv_cache_dtype="float32",
        **settings,
    )


def test_every_architecture_is_served_or_refused_with_a_reason() -> None:
    known = set(gguf.MODEL_ARCH_NAMES.values())
    assert not known - set(ARCHITECTURES) - set(UNSERVED) and not set(ARCHITECTURES) & set(UNSERVED)
    assert {name.partition(" ")[0] for name in CASES} | {
        layout.arch for layout in OTHER_LAYOUTS.values()
    } == set(ARCHITECTURES) - SAME_TABLE
