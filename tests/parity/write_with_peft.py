"""Writes tiny models with random LoRA adapters as the package peft makes them, and the logits that
it computes.

    python write_with_peft.py FOLDER

It runs in an environment with torch, transformers, safetensors and peft, without Pegboard. Each
case becomes a folder with `model`, `adapter` and `expected.safetensors`: token ids [positions], and
the log-softmax [positions, V] of the logits with the adapter and without it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 131
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
PARAMETERS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
COMMON = {"r": 4, "lora_alpha": 8}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: (model type, config of the model, LoraConfig)
    "all linear": ("llama", {}, {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
    "one layer": (
        "llama",
        {},
        {"r": 3, "lora_alpha": 5, "target_modules": ["v_proj"], "layers_to_transform": [1]},
    ),
    "a regular expression": (
        "qwen3",
        {"head_dim": 8},
        {**COMMON, "target_modules": r".*\.(q|up)_proj"},
    ),
    "ranks": (
        "qwen2",
        {},
        {
            **COMMON,
            "target_modules": LINEAR,
            "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 2},
        },
    ),
    "alphas": (
        "mistral",
        {},
        {
            **COMMON,
            "target_modules": LINEAR,
            "alpha_pattern": {"o_proj": 3, "layers.0.self_attn.q_proj": 1},
        },
    ),
    "ranks and alphas with a root": (
        "llama",
        {"attention_bias": True},
        {
            "r": 8,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": LINEAR,
            "rank_pattern": {"^model.layers.2.self_attn.k_proj": 5, "k_proj": 3},
            "alpha_pattern": {"gate_proj": 2, "k_proj": 7},
        },
    ),
    "embeddings and head": (
        "llama",
        {},
        {**COMMON, "target_modules": [*LINEAR, "embed_tokens", "lm_head"]},
    ),
    "tied embeddings": (
        "qwen2",
        {"tie_word_embeddings": True},
        {**COMMON, "target_modules": ["embed_tokens", "q_proj"]},
    ),
    "merged in the checkpoint": (
        "phi3",
        {},
        {**COMMON, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]},
    ),
    "gemma": ("gemma", {"head_dim": 8}, {**COMMON, "target_modules": "all-linear"}),
    "experts": (
        "qwen3_moe",
        {"head_dim": 8, **EXPERTS},
        {**COMMON, "target_modules": ["q_proj", "gate"], **PARAMETERS},
    ),
    "experts under another name": (
        "mixtral",
        {"num_local_experts": 4},
        {**COMMON, "target_modules": ["q_proj"], **PARAMETERS},
    ),
    "experts without a module": (
        "granitemoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {
            **COMMON,
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
    "experts' output": (
        "qwen3_moe",
        {"head_dim": 8, **EXPERTS},
        {
            **COMMON,
            "use_rslora": True,
            "target_modules": [],
            "target_parameters": ["mlp.experts.down_proj"],
        },
    ),
    "interleaved experts": (
        "gpt_oss",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {**COMMON, "target_modules": ["v_proj"], **PARAMETERS},
    ),
    "fallback": ("olmo2", {}, {**COMMON, "target_modules": "all-linear"}),
}


def random_model(model_type: str, config: dict[str, Any]) -> Any:
    """Every tensor is random, also those of norms and biases."""
    made = AutoConfig.for_model(model_type, **{**SIZES, **config})
    model = AutoModelForCausalLM.from_config(
        made, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        spread = 0.1 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
        parameter.data.add_(torch.randn(parameter.shape) * spread)
    return model


@torch.no_grad()
def write(folder: Path, model_type: str, config: dict[str, Any], lora: dict[str, Any]) -> None:
    model = random_model(model_type, config)
    model.save_pretrained(folder / "model")
    tokens = torch.randint(3, VOCAB_SIZE, (48,))
    found = {"tokens": tokens, "base": model(tokens[None]).logits[0].log_softmax(-1)}
    changed = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora)).eval()
    for name, parameter in changed.named_parameters():
        if "lora_" in name:  # B is zero at the start
            parameter.copy_(
                torch.randn(parameter.shape)
                * (1.0 if "embedding_A" in name else 0.5 * parameter.shape[-1] ** -0.5)
            )
    found["adapter"] = changed(tokens[None]).logits[0].log_softmax(-1)
    changed.save_pretrained(folder / "adapter")
    save_file(
        {name: values.contiguous() for name, values in found.items()},
        folder / "expected.safetensors",
    )


def main() -> None:
    print(
        f"peft {peft.__version__}, transformers {transformers.__version__}, torch "
        f"{torch.__version__}"
    )
    for number, (name, case) in enumerate(CASES.items()):
        torch.manual_seed(number)
        write(Path(sys.argv[1]) / name, *case)


if __name__ == "__main__":
    main()
