"""Checkpoints in Mistral's own format, written from transformers' models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pegboard_weight_loader_mistral.names import (
    EXPERT_MODULES,
    LATENT_MODULES,
    MODULES,
    OUTSIDE,
)
from pegboard_weight_loader_mistral.params import LATENT_MIXTURE, LATENT_NAMES, NAMES
from safetensors.torch import save_file

OUTER = {ours.removesuffix(".weight"): name for name, ours in OUTSIDE.items()}
INSIDE = {ours: name for name, ours in {**MODULES, **LATENT_MODULES}.items()}
MIXTURES = {
    "block_sparse_moe.experts": ("feed_forward.experts", {name: name for name in EXPERT_MODULES}),
    "mlp.experts": ("experts", {ours: name for name, ours in EXPERT_MODULES.items()}),
}


def mistral_name(name: str) -> str:
    """Return the name in Mistral's format of a tensor in Hugging Face layout."""
    module, _, kind = name.rpartition(".")
    if module in OUTER:
        return f"{OUTER[module].removesuffix('.weight')}.{kind}"
    _, _, layer, inside = module.split(".", 3)
    for path, (stored, matrices) in MIXTURES.items():
        if inside.startswith(f"{path}."):
            expert, matrix = inside.removeprefix(f"{path}.").split(".")
            return f"layers.{layer}.{stored}.{expert}.{matrices[matrix]}.{kind}"
    return f"layers.{layer}.{INSIDE[inside]}.{kind}"


def unstacked(tensors: Mapping[str, torch.Tensor], is_latent: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a model with a matrix for each expert."""
    names = ("gate_proj", "up_proj", "down_proj") if is_latent else ("w1", "w3", "w2")
    single = {}
    for name, value in tensors.items():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            if not is_latent:
                name = name.replace("mlp.gate.", "block_sparse_moe.gate.")
            single[name] = value
            continue
        path = name.rpartition(".")[0]
        if not is_latent:
            path = path.replace(".mlp.", ".block_sparse_moe.")
        matrices = names[:2] if name.endswith("gate_up_proj") else names[2:]
        for expert, both in enumerate(value):
            for matrix, part in zip(matrices, both.chunk(len(matrices)), strict=True):
                single[f"{path}.{expert}.{matrix}.weight"] = part
    return single


def paired(value: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rows of Q or K with the two that rotate together beside each other."""
    halves = value.view(value.shape[0] // head_dim, 2, head_dim // 2, -1)
    return halves.transpose(1, 2).reshape(value.shape)


def write_mistral(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], **more: Any
) -> None:
    """Write tensors and config, both in Hugging Face layout. more: of params.json."""
    folder.mkdir(exist_ok=True)
    is_latent = bool(config.get("kv_lora_rank"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    stored = {}
    for name, value in unstacked(tensors, is_latent).items():
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")) and not is_latent:
            value = paired(value, head_dim)
        stored[mistral_name(name)] = value.contiguous()
    save_file(stored, folder / "consolidated.safetensors")
    params = {theirs: config[ours] for theirs, ours in NAMES.items() if config.get(ours)}
    if is_latent:
        params |= {name: config.get(name) for name in LATENT_NAMES}
        params["moe"] = {
            theirs: config[ours] for theirs, ours in LATENT_MIXTURE.items() if ours in config
        }
    params["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (folder / "params.json").write_text(json.dumps(params | {"max_seq_len": 64} | more))
