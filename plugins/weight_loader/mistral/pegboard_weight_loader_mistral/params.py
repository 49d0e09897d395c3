"""From Mistral's params.json to a config of Hugging Face. This module does not import torch.

The keys are those of `TransformerArgs` in https://github.com/mistralai/mistral-inference, and those
of later models. Rows of Q and K are in pairs, as the rotary embedding of that program turns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.data.checkpoint_file import read_object
from pegboard.errors import ModelError, brief
from pegboard.log import get_logger
from pegboard_weight_loader_mistral.quantization import quantization_of

log = get_logger(__name__)

NAMES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
    "llama_4_scaling": "llama_4_scaling",
}
"""Key of params.json → key of a config."""
LATENT_NAMES = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
"""The sizes of latent attention have the same names in both."""
REQUIRED = ("dim", "hidden_dim", "n_layers", "n_heads", "vocab_size")
LENGTHS = ("max_position_embeddings", "max_seq_len")
PARTS = ("moe", "quantization", "sliding_window", "vision_encoder", "yarn")
"""Keys whose values have a form of their own."""
DEFAULT_LENGTH = 128_000
"""Tokens of a model whose params.json names no limit, as in vLLM."""
MIXTURE = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
LATENT_MIXTURE = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "route_every_n": "moe_layer_freq",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
MIXTURE_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "expert_parallel": (),
    "expert_model_parallel": (),
    "renorm_strategy": ("WEIGHTS",),
    "use_load_balancing_bias": (False,),
}
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "causal": (True,),
    "dtype": (),
    "max_batch_size": (),
    "model_type": ("transformer", "mistral"),
    "use_biases": (False,),
    "use_cache": (True,),
}
"""Other keys → the values that change nothing; () = all. null changes nothing either."""


def read_params(path: Path) -> dict[str, Any]:
    """Return the config that a params.json stands for. Raises ModelError, which names a key that is
    missing or not supported."""
    if not path.is_file():
        raise ModelError(
            f"{path.parent} has no params.json; load format 'mistral' reads Mistral's own format"
        )
    params = {key: value for key, value in read_object(path).items() if value is not None}
    if missing := [key for key in REQUIRED if key not in params]:
        raise ModelError(f"{path} has no {', '.join(missing)}")
    for key, value in params.items():
        if key in NAMES or key in LENGTHS or key in LATENT_NAMES or key in PARTS:
            continue
        if not _is_harmless(WITHOUT_EFFECT, key, value):
            raise unsupported(path, key, value)
    if "vision_encoder" in params:
        log.warning(
            "%s: only the language model is served; images are taken by the model in Hugging Face "
            "layout",
            path,
        )
    lengths = [params[key] for key in LENGTHS if key in params]
    config = {
        "hidden_act": "silu",
        "max_position_embeddings": lengths[0] if lengths else DEFAULT_LENGTH,
        "num_key_value_heads": params["n_heads"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        **{NAMES[key]: value for key, value in params.items() if key in NAMES},
        **_windows(path, params),
        **quantization_of(path, params.get("quantization")),
    }
    is_latent = "kv_lora_rank" in params
    config |= _latent(path, params) if is_latent else _usual(path, params)
    return config | _rope(path, params, config["rope_theta"], is_latent)


def unsupported(path: Path, key: str, value: object) -> ModelError:
    """Return an error about a key of params.json."""
    return ModelError(
        f"{path}: {key} is {brief(value)}, which load format 'mistral' does not support; use the "
        "model in Hugging Face layout"
    )


def _is_harmless(harmless: Mapping[str, tuple[object, ...]], key: str, value: object) -> bool:
    return key in harmless and (not harmless[key] or value in harmless[key])


def _windows(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the windows of layers. A list is repeated until all layers have an entry. Its null is
    a layer without a window."""
    given = params.get("sliding_window")
    if not isinstance(given, list):
        return {"sliding_window": given}
    count = params["n_layers"]
    windows = {each for each in given if each is not None}
    if len(windows) > 1 or not given or count % len(given):
        raise unsupported(path, "sliding_window", given)
    kinds = ["full_attention" if each is None else "sliding_attention" for each in given]
    return {
        "sliding_window": next(iter(windows), None),
        "layer_types": kinds * (count // len(given)),
    }


def _usual(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is special about a model without latent attention."""
    for key in LATENT_NAMES:
        if key in params:
            raise unsupported(path, key, params[key])
    mixture = params.get("moe")
    if mixture is None:
        is_plain = "llama_4_scaling" not in params
        return (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
            if is_plain
            else {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
        )
    if not isinstance(mixture, Mapping) or mixture.keys() != MIXTURE.keys():
        raise ModelError(
            f"{path}: moe is {brief(mixture)}, expected only {' and '.join(MIXTURE)} in a model "
            "without latent attention; use the model in Hugging Face layout"
        )
    if "llama_4_scaling" in params:
        raise unsupported(path, "llama_4_scaling", params["llama_4_scaling"])
    names = {MIXTURE[key]: value for key, value in mixture.items()}
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **names}


def _latent(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is special about a model with latent attention. Without a mixture, all its layers
    are dense."""
    sizes = {key: params[key] for key in LATENT_NAMES if key in params}
    if missing := [key for key in LATENT_NAMES[1:] if key not in sizes]:
        raise ModelError(f"{path} has kv_lora_rank, but no {', '.join(missing)}")
    mixture = params.get("moe") or {}
    if not isinstance(mixture, Mapping):
        raise unsupported(path, "moe", mixture)
    for key, value in mixture.items():
        if key not in LATENT_MIXTURE and not _is_harmless(MIXTURE_WITHOUT_EFFECT, key, value):
            raise unsupported(path, f"moe.{key}", value)
    return {
        "architectures": ["MistralLarge3ForCausalLM"],
        "model_type": "mistral4",
        "scoring_func": "softmax",
        "norm_topk_prob": True,
        **sizes,
        **{LATENT_MIXTURE[key]: mixture[key] for key in LATENT_MIXTURE if key in mixture},
    }


def _rope(path: Path, params: Mapping[str, Any], base: float, is_latent: bool) -> dict[str, Any]:
    """Return the rotary parameters of YaRN. apply_scale says whether scores grow with the factor:
    in latent attention, the scale of q·k holds that, and otherwise the rotary embedding."""
    yarn = params.get("yarn")
    if not yarn:
        return {}
    required = ("factor", "original_max_position_embeddings")
    if (
        not isinstance(yarn, Mapping)
        or not set(yarn) <= {*YARN, "apply_scale"}
        or not yarn.keys() >= set(required)
    ):
        raise ModelError(
            f"{path}: yarn is {brief(yarn)}, expected {' and '.join(required)}, and at most beta, "
            "alpha and apply_scale; use the model in Hugging Face layout"
        )
    rule = {"rope_type": "yarn", "rope_theta": base}
    rule |= {name: yarn[key] for key, name in YARN.items() if key in yarn}
    if yarn.get("apply_scale") is False:
        rule["attention_factor"] = 1.0
    elif is_latent:
        rule |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return {"rope_parameters": rule}
