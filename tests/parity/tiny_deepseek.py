"""Language models of DeepSeek's models that read images: those of transformers, with the config and
the names of published checkpoints, and the comparison of what follows rows of images."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_media import MediaReference, Prompt, make_tokenizer
from tiny_media import language_model as our_language
from tiny_models import SIZES, VOCAB_SIZE, make_model
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from pegboard.errors import ModelError
from pegboard_testing.fake_build import fake_build

MARK = "<image>"
IMAGE = 100
HIDDEN = SIZES["hidden_size"]
HEADS = SIZES["num_attention_heads"]
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
WHOLE = {**SIZES, "num_key_value_heads": HEADS, "max_position_embeddings": 512}
GREEDY = {"topk_method": "greedy"}
V3 = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
PUBLISHED: dict[str, dict[str, Any]] = {
    "ordinary attention": {
        **GREEDY,
        "use_mla": False,
        "kv_lora_rank": None,
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
    },
    "latent attention": {**GREEDY, **LATENT},
    "corrected experts": {**V3, "routed_scaling_factor": 2.0, **LATENT},
}
"""What the language_config says, like that of Tiny, of Small and of the largest one."""


def language_config(name: str) -> dict[str, Any]:
    """Return a published language_config."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "code.Model"},
        "model_type": "deepseek_v2",
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "lm_head": True,
        "rm_head": False,
        "torch_dtype": "float32",
        **WHOLE,
        **EXPERTS,
        **PUBLISHED[name],
    }


def language_model(name: str) -> Any:
    """Return the same model of transformers. It has no class with ordinary attention and these
    experts, so that of Llama takes the place of latent attention."""
    values = {**WHOLE, **EXPERTS, **LATENT, "tie_word_embeddings": False}
    if name == "corrected experts":
        factor = PUBLISHED[name]["routed_scaling_factor"]
        more = {"norm_topk_prob": True, "routed_scaling_factor": factor}
        return make_model("deepseek_v3", **values, **more)
    model = make_model("deepseek_v2", **values, **GREEDY, head_dim=LATENT["qk_rope_head_dim"])
    if name == "ordinary attention":
        config = LlamaConfig(**WHOLE, attn_implementation="eager")
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
        for index, layer in enumerate(model.model.layers):
            layer.self_attn = LlamaAttention(config, index)
            randomize(layer.self_attn)
    return model


def randomize(module: nn.Module) -> None:
    """Make every tensor random."""
    with torch.no_grad():
        for parameter in module.parameters():
            spread = 1.0 / parameter[0].numel() ** 0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape) * spread)


@dataclass
class RowsReference(MediaReference):
    """rows: what transformers makes of an image, [rows, width]."""

    rows: Callable[[Any], Tensor]

    def logprobs(self, prompt: Prompt, outputs: Sequence[int]) -> Tensor:
        """The same as that of `MediaReference`, with rows in place of the embeddings."""
        table = self.model.get_input_embeddings()
        images = iter(prompt.get("multi_modal_data", {}).get("image", []))
        parts = []
        with torch.no_grad():
            for word in prompt["prompt"].split():
                is_image = word == MARK
                parts.append(self.rows(next(images)) if is_image else table.weight[[int(word[1:])]])
            parts.append(table(torch.tensor([*outputs]).long()))
            logits = self.model(inputs_embeds=torch.cat(parts)[None], use_cache=False).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def write_published(
    folder: Path,
    language: Any,
    prefix: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    values: Mapping[str, Any],
) -> None:
    """Write a checkpoint. prefix: of the language model's tensors. tensors: the others, with their
    published names. values: of processor_config.json."""
    language.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = {f"{prefix}{name}": tensor for name, tensor in load_file(file).items()}
    stored |= {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(stored, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "processor_config.json").write_text(json.dumps(values))
    make_tokenizer([MARK], MARK).save_pretrained(folder)


ODD: list[Any] = [None, [1], {}, {"a": 1}, "text", True, 0.5, -1.5, float("nan"), float("inf"), 7]
READ = ("architectures", "model_type", "use_mla", "lm_head", "rm_head", "head_dim", "topk_method")


def check_odd_values(kind: Any, config: Mapping[str, Any], stored: Sequence[str]) -> None:
    """Check that an odd value anywhere is a ModelError, if anything. kind: our model. stored: names
    of tensors."""
    places: list[tuple[str, ...]] = [(name,) for name in config]
    places += [("language_config", name) for name in READ]
    pending: list[tuple[str, ...]] = [("vision_config",), ("projector_config",)]
    while pending:
        place = pending.pop()
        inner: Any = config
        for name in place:
            inner = inner[name]
        if isinstance(inner, Mapping):
            pending += [(*place, name) for name in inner]
        places.append(place)
    for place in places:
        for value in ODD:
            changed = json.loads(json.dumps(config))
            inner = changed
            for name in place[:-1]:
                inner = inner[name]
            inner[place[-1]] = value
            with contextlib.suppress(ModelError):
                kind(changed, fake_build(stored=stored, models=our_language))
