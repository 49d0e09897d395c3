"""Checkpoints of random numbers in the shape of a model, for measuring speed.

Quantized ones have the tensors that contract tests of the methods write.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from formats import FORMATS
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pegboard.config.schema import EngineConfig, Settings
from pegboard.interfaces.quantization import Part
from pegboard.plan.engine_plan import resolve

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
}
"""Those of Qwen3-0.6B, with 12 of its 28 layers and a smaller vocabulary, a mixture of 32 experts,
and Gemma 3 270M."""

COMMON = {"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def as_fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """One scale per matrix."""
    scale = weight.float().abs().amax() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {name: codes, name.replace("weight", "weight_scale"): scale}


def as_awq(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Groups of 128 columns, with zero points. The numbers are the contract test's own."""
    rows = (0, weight.shape[0])
    pieces, _ = AWQ.stored(Part(name, rows), weight.float(), "bfloat16")
    return {piece.name: piece.data for piece in pieces}


AWQ = FORMATS["awq:Gemm"]()
TYPES: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], dict[str, Tensor]]] | None] = {
    "bfloat16": None,
    "FP8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
        as_fp8,
    ),
    "AWQ": (AWQ.config, as_awq),
}
"""How the matrices of layers are stored: `quantization_config`, and the tensors of a matrix."""


def write(shape: str, kind: str, folder: Path) -> int:
    """Write a checkpoint, with the default model's tokenizer. Returns the bytes of the weights that
    a token reads."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape, **COMMON, **SHAPES[shape])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    source = resolve(Settings(engine=EngineConfig()))[0].checkpoint.path
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    if (stored := TYPES[kind]) is not None:
        _store(folder, *stored)
    return (folder / "model.safetensors").stat().st_size


def _store(
    folder: Path, config: dict[str, Any], tensors_of: Callable[[str, Tensor], dict[str, Tensor]]
) -> None:
    """Store the matrices of layers in another form."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors.update(tensors_of(name, tensors.pop(name)))
    save_file({name: held.contiguous() for name, held in tensors.items()}, path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    settings["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
