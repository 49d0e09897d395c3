"""From Mistral's params.json and names of tensors to those of Hugging Face. This module does not
import torch.

The keys are those of `TransformerArgs` in https://github.com/mistralai/mistral-inference. Rows of Q
and K are in pairs, as the rotary embedding of that program turns them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.data.checkpoint_file import read_object
from pegboard.errors import ModelError, brief

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
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
}
"""Key of params.json → key of a config."""
REQUIRED = ("dim", "hidden_dim", "n_layers", "n_heads", "vocab_size")
LENGTHS = ("max_position_embeddings", "max_seq_len")
DEFAULT_LENGTH = 128_000
"""Tokens of a model whose params.json names no limit, as in vLLM."""
MIXTURE = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "causal": (True,),
    "max_batch_size": (),
    "model_type": ("transformer", "mistral"),
    "use_biases": (False,),
    "use_cache": (True,),
}
"""Other keys → the values that change nothing; () = all. null changes nothing either."""
MODULES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}
"""Module of a layer → its name in Hugging Face layout."""
OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_EXPERT = re.compile(r"(?:feed_forward|block_sparse_moe)\.experts\.(\d+)\.(w[123])")


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
        if key in NAMES or key in LENGTHS or key == "moe":
            continue
        if key not in WITHOUT_EFFECT or (harmless := WITHOUT_EFFECT[key]) and value not in harmless:
            raise ModelError(
                f"{path}: {key} is {brief(value)}, which load format 'mistral' does not support; "
                "use the model in Hugging Face layout"
            )
    lengths = [params[key] for key in LENGTHS if key in params]
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "max_position_embeddings": lengths[0] if lengths else DEFAULT_LENGTH,
        "num_key_value_heads": params["n_heads"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        **{NAMES[key]: value for key, value in params.items() if key in NAMES},
    }
    mixture = params.get("moe")
    return config if mixture is None else {**config, **_mixture(path, mixture)}


def _mixture(path: Path, mixture: Any) -> dict[str, Any]:
    if not isinstance(mixture, Mapping) or mixture.keys() != MIXTURE.keys():
        raise ModelError(
            f"{path}: moe is {brief(mixture)}, expected only {' and '.join(MIXTURE)}; use the "
            "model in Hugging Face layout"
        )
    names = {MIXTURE[key]: value for key, value in mixture.items()}
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **names}


def hugging_face_name(name: str) -> str | None:
    """Return the name in Hugging Face layout of a tensor in Mistral's, or None if it is none of a
    text model."""
    if outside := OUTSIDE.get(name):
        return outside
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    layer, module = match.groups()
    if expert := _EXPERT.fullmatch(module):
        known: str | None = f"block_sparse_moe.experts.{expert[1]}.{expert[2]}"
    else:
        known = MODULES.get(module.replace("block_sparse_moe.gate", "feed_forward.gate"))
    return known and f"model.layers.{layer}.{known}.weight"
