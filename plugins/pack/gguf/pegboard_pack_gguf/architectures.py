"""Translates GGUF architectures into Hugging Face terms: model classes and tensor names.

GGUF names come from llama.cpp's tensor table, Hugging Face names from the checkpoints of the models. `Architecture.rope_style`
is "pairs" if the converter permuted the rows of Q and K (Llama and its descendants), otherwise "halves".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import TensorEntry
from pegboard_pack_gguf.header import GGUFHeader, GGUFTensor

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Names outside the layers, without ".weight"."""

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

GEMMA_LAYER = {
    **LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

PHI3_LAYER = {**LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}

QWEN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}

QWEN_MOE_LAYER = {
    **LAYER,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

READ_INTO_CONFIG = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that become part of the configuration and are not in the index."""

MAX_EXPERTS = 10_000

_LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. experts: GGUF stacks them into one tensor, but Hugging Face names each one; `{}` is the expert's number.
    norm_offset: the number that the converter added to every norm weight (Gemma stores 1 + w)."""

    class_name: str
    model_type: str
    rope_style: Literal["halves", "pairs"] = "halves"
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    experts: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0


LLAMA = Architecture("LlamaForCausalLM", "llama", "pairs")
MIXTRAL = Architecture(
    "MixtralForCausalLM", "mixtral", "pairs", {**LAYER, "ffn_gate_inp": "block_sparse_moe.gate"}, MIXTRAL_EXPERTS
)
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", layer=QWEN_MOE_LAYER, experts=QWEN_EXPERTS),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", layer=QWEN_MOE_LAYER, experts=QWEN_EXPERTS),
    "gemma": Architecture("GemmaForCausalLM", "gemma", norm_offset=1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", layer=GEMMA_LAYER, norm_offset=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", layer=GEMMA_LAYER, norm_offset=1.0),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", layer=PHI3_LAYER),
}
BY_MODEL_TYPE = {architecture.model_type: architecture for architecture in (*ARCHITECTURES.values(), MIXTRAL)}


def architecture_of(header: GGUFHeader) -> tuple[str, Architecture]:
    """Returns the name that the file uses (also the prefix of its metadata keys) and the architecture that it means."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: GGUF architecture {name!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return name, MIXTRAL
    return name, ARCHITECTURES[name]


def tensor_entries(header: GGUFHeader, architecture: Architecture, num_layers: int) -> Iterator[TensorEntry]:
    """Yields the file's tensors by their Hugging Face names. Raises ModelError for an unknown tensor, because without it, a
    different model would be computed."""
    for tensor in header.tensors:
        if tensor.name in READ_INTO_CONFIG:
            continue
        found = _LAYER_NAME.fullmatch(tensor.name)
        if found is not None and int(found[1]) < num_layers:
            prefix, name, ending = f"model.layers.{int(found[1])}.", found[2], found[3]
            if name in architecture.experts and ending == "weight" and len(tensor.shape) == 3:
                yield from _expert_entries(header, tensor, f"{prefix}{architecture.experts[name]}.weight")
                continue
            if name in architecture.layer:
                yield _entry(header, tensor, f"{prefix}{architecture.layer[name]}.{ending}")
                continue
        found = _TOP_NAME.fullmatch(tensor.name)
        if found is None or found[1] not in TOP:
            raise ModelError(
                f"{header.path}: tensor {tensor.name!r} has no place in a {architecture.class_name} of {num_layers} layers"
            )
        yield _entry(header, tensor, f"{TOP[found[1]]}.{found[2]}")


def _entry(header: GGUFHeader, tensor: GGUFTensor, name: str) -> TensorEntry:
    shape = tensor.shape
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)  # GGUF drops the dimension of one
    return TensorEntry(name, shape, tensor.type.stored, header.path.name, tensor.offset, tensor.num_bytes)


def _expert_entries(header: GGUFHeader, tensor: GGUFTensor, pattern: str) -> Iterator[TensorEntry]:
    num_experts, *shape = tensor.shape
    if num_experts > MAX_EXPERTS:
        raise ModelError(f"{header.path}: tensor {tensor.name!r} contains {num_experts} experts, expected at most {MAX_EXPERTS}")
    size = tensor.num_bytes // num_experts
    for expert in range(num_experts):
        offset = tensor.offset + expert * size
        yield TensorEntry(pattern.format(expert), tuple(shape), tensor.type.stored, header.path.name, offset, size)
