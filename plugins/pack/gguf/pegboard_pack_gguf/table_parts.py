"""What a table of an architecture has, and what many tables share.

GGUF names come from llama.cpp's tensor table, Hugging Face names from the checkpoints of the
models. The defaults of metadata are those of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Change = Literal[
    "unpermute", "transpose", "float", "by_head", "logarithm", "flat", "convolution", "by_key_head"
]
"""What is done to a tensor before it is delivered:

unpermute   rows of Q or K, which the converter stored in pairs, get the order that the model has on
Hugging Face by_head     rows of Q, K and V, one after the other, become those of each KV head: its
queries, its key and its value by_key_head rows of all queries, keys, values and gates of linear
attention become those of each key head transpose   the model stores [in, out]; blocks are
dequantized float       blocks are dequantized, because the model takes no others
logarithm   the file has -exp(x); a last dimension of one is dropped
flat        all dimensions become one
convolution [C, K] becomes [C, 1, K]
"""


@dataclass(frozen=True, slots=True)
class Key:
    """A value of the metadata. default: if the file has none; REQUIRED = that is an error, None =
    the config has none either."""

    name: str
    kind: Literal["number", "count"] = "number"
    default: Any = None


class _Required:
    pass


REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class Has:
    """True if the file has one of these tensors. in_any_layer: they are named without their layer,
    and one that has it is enough."""

    tensors: tuple[str, ...]
    in_any_layer: bool = False


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SPLIT = {"attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
UNPERMUTE: Mapping[str, Change] = {"attn_q": "unpermute", "attn_k": "unpermute"}

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **ATTENTION,
    **GATED,
}

RMS = {"rms_norm_eps": Key("attention.layer_norm_rms_epsilon", default=REQUIRED)}
LAYER_NORM_EPS = Key("attention.layer_norm_epsilon", default=1e-5)
QKV_BIAS = Has(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"))
GRANITE_SCALES = {
    "attention_multiplier": Key("attention.scale"),
    "embedding_multiplier": Key("embedding_scale", default=1.0),
    "residual_multiplier": Key("residual_scale", default=1.0),
    "logits_scaling": Key("logit_scale", default=1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture. Names are without the ending ".weight" or ".bias".

    layers: where the layers are. top, layer: Hugging Face names by GGUF names. split: merged
    tensors whose rows are the parts that are named here, Q, K and V. experts: GGUF stacks them into
    one tensor, but Hugging Face names each one; `{}` is the expert's number. changes: by GGUF name.
    rope_style: "pairs" if rows of Q and K are delivered as the converter permuted them, which needs
    a model that can compute with them. norm_offset: the number that the converter added to every
    norm weight (Gemma stores 1 + w), but those of states. config: values of the configuration
    beyond those that all models have. full_every: with a sliding window, every n-th layer has
    full attention. is_partly_rotary: the config says how much of each head is rotated, even if it
    is all of it. whole: Hugging Face names of tensors of a layer that are not a module's weight or
    bias, by the whole GGUF name, which `changes` has too. is_latent: keys and values are functions
    of one vector per token (MLA), so other sizes describe a head. joined: modules of a layer that
    the converter took apart: their parts, below each other, by the Hugging Face name of the whole.
    joined_change: what is done to these. keeps_states: some layers or all have a state instead of
    attention.
    """

    class_name: str
    model_type: str
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layers: str = "model.layers"
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    split: Mapping[str, tuple[str, str, str]] = field(default_factory=lambda: SPLIT)
    experts: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    rope_style: Literal["halves", "pairs"] = "halves"
    norm_offset: float = 0.0
    config: Mapping[str, Any] = field(default_factory=lambda: RMS)
    full_every: int | None = None
    is_partly_rotary: bool = False
    whole: Mapping[str, str] = field(default_factory=dict)
    is_latent: bool = False
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keeps_states: bool = False
    joined_change: Change | None = None
