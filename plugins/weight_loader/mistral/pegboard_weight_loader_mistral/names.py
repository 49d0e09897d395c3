"""From Mistral's names of tensors to those of Hugging Face. This module does not import torch."""

from __future__ import annotations

import re

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
LATENT_MODULES = {
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "gate": "mlp.gate",
    "shared_experts.w1": "mlp.shared_experts.gate_proj",
    "shared_experts.w2": "mlp.shared_experts.down_proj",
    "shared_experts.w3": "mlp.shared_experts.up_proj",
}
"""The same for models with latent attention."""
EXPERT_MODULES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
KINDS = {
    **{
        kind: kind
        for kind in (
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_shape",
            "weight_zero_point",
            "weight_g_idx",
            "weight_global_scale",
            "input_scale",
            "input_global_scale",
        )
    },
    "qscale_act": "input_scale",
    "qscale_weight": "weight_scale",
}
"""What a tensor of a module is called → the same in Hugging Face layout."""
VISION = (
    "vision_encoder.",
    "vision_language_adapter.",
    "patch_merger.",
    "pre_mm_projector_norm.",
)
"""How the names of tensors begin that turn images into rows."""
UNUSED = re.compile(r"layers\.\d+\.attention\.q_fake_quantizer\.qscale_act")
"""Scales of queries, which no attention rounds."""
_CACHE = re.compile(r"layers\.(\d+)\.attention\.([kv])_fake_quantizer\.qscale_act")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.([^.]+)")
_OUTER = re.compile(r"(tok_embeddings|norm|output)\.([^.]+)")
_MIXTRAL_EXPERT = re.compile(r"(?:feed_forward|block_sparse_moe)\.experts\.(\d+)\.(w[123])")
_LATENT_EXPERT = re.compile(r"experts\.(\d+)\.(w[123])")


def hugging_face_name(name: str) -> str | None:
    """Return the name in Hugging Face layout of a tensor in Mistral's, or None if it is none of a
    text model."""
    if scale := _CACHE.fullmatch(name):
        return f"model.layers.{scale[1]}.self_attn.{scale[2]}_scale"
    if outer := _OUTER.fullmatch(name):
        module: str | None = OUTSIDE[f"{outer[1]}.weight"].removesuffix(".weight")
        kind = outer[2]
    elif layer := _LAYER.fullmatch(name):
        inside = _in_layer(layer[2])
        module = inside and f"model.layers.{layer[1]}.{inside}"
        kind = layer[3]
    else:
        return None
    return f"{module}.{KINDS[kind]}" if module and kind in KINDS else None


def _in_layer(module: str) -> str | None:
    if expert := _MIXTRAL_EXPERT.fullmatch(module):
        return f"block_sparse_moe.experts.{expert[1]}.{expert[2]}"
    if expert := _LATENT_EXPERT.fullmatch(module):
        return f"mlp.experts.{expert[1]}.{EXPERT_MODULES[expert[2]]}"
    known = module.replace("block_sparse_moe.gate", "feed_forward.gate")
    return MODULES.get(known) or LATENT_MODULES.get(known)
