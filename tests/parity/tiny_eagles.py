"""Tiny EAGLE heads of other families than Llama, and what they propose, computed by plain torch
with transformers' layers over the whole text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, make_model
from torch import Tensor, nn

HIDDEN = SIZES["hidden_size"]
HEAD_LAYERS = 2
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
CHUNK = 10
LLAMA4 = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "intermediate_size_mlp": 64,
    "attention_chunk_size": CHUNK,
    "no_rope_layer_interval": 2,
    "floor_scale": 7,
    "attn_scale": 0.3,
}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 8**-0.5, "logits_scaling": 2.0}
DEPTH = 0.8


@dataclass
class Family:
    """A sort of head. model_type: of transformers, of which are the target and the layers of the
    head. config: of both. target, head: what their configs say besides, in the terms of the
    checkpoint. of_head: of the model from which the head's layers are. norms: of embeddings and of
    states, before the projection. given: the factor of the target's states, and of the head's."""

    architecture: str
    model_type: str
    config: dict[str, Any]
    target: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    of_target: dict[str, Any] = field(default_factory=dict)
    of_head: dict[str, Any] = field(default_factory=dict)
    layers: str = "layers"
    norms: tuple[str, str] | None = None
    has_norm: bool = True
    embedding: float = 1.0
    given: float = 1.0


def minicpm(layers: int) -> dict[str, Any]:
    """Return MiniCPM's terms."""
    return {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "scale_emb": 3.0,
        "scale_depth": DEPTH,
        "dim_model_base": HIDDEN // 2,
        "num_hidden_layers": layers,
    }


FAMILIES = {
    "llama4": Family(
        "EagleLlama4ForCausalLM",
        "llama4_text",
        LLAMA4,
        of_head={"moe_layers": []},
    ),
    "minicpm": Family(
        "EagleMiniCPMForCausalLM",
        "granite",
        GRANITE,
        target=minicpm(3),
        head={**minicpm(HEAD_LAYERS), "mup_denominator": 5},
        of_target={"residual_multiplier": DEPTH / 3**0.5},
        of_head={"residual_multiplier": DEPTH / 5**0.5},
        layers="eagle_layers",
        norms=("input_norm1", "input_norm2"),
        has_norm=False,
        embedding=3.0,
        given=0.5,
    ),
    "mistral_large_3": Family(
        "EagleMistralLarge3ForCausalLM",
        "deepseek_v2",
        LATENT,
        head={"topk_method": None, "scoring_func": "softmax", "n_group": 1, "topk_group": 1},
    ),
}


class Normed(nn.Module):
    """RMSNorm. eps: as in the target's config."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN) * 0.1 + 1)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class TinyEagle:
    """A target, and a head. has_table: the head has an embedding and an output head of its own.
    is_right: what the target says after a token depends on no other, and the head says the same."""

    def __init__(
        self, folder: Path, family: Family, *, is_right: bool = False, has_table: bool = False
    ) -> None:
        self.family = family
        common = {"tie_word_embeddings": False, **family.config}
        self.model = make_model(family.model_type, **{**common, **family.of_target})
        count = {"num_hidden_layers": HEAD_LAYERS}
        self.source = make_model(family.model_type, **{**common, **count, **family.of_head})
        eps = self.model.config.rms_norm_eps
        torch.manual_seed(17)
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.norms = nn.ModuleList(Normed(eps) for _ in family.norms or ())
        with torch.no_grad():
            for parameter in self.source.parameters():
                spread = 1 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.1
                parameter.add_(torch.randn(parameter.shape) * spread)
            if is_right:
                self.make_right()
        self.has_table = has_table
        self.directory = self.write(folder)

    def make_right(self) -> None:
        for model in (self.model, self.source):
            for name, parameter in model.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    parameter.zero_()
        weight = self.model.model.norm.weight
        self.source.model.norm.weight.copy_(weight)
        rows = torch.eye(HIDDEN) if self.family.has_norm else torch.diag(weight)
        self.fc.weight.copy_(torch.cat([rows, torch.zeros(HIDDEN, HIDDEN)], 1))
        for norm in self.norms:
            norm.weight.fill_(1.0)

    def write(self, folder: Path) -> Path:
        """Write both checkpoints. Returns the folder of the target."""
        family = self.family
        self.head_directory = folder / "head"
        for model, path, more in (
            (self.model, folder / "model", family.target),
            (self.source, self.head_directory, family.head),
        ):
            model.save_pretrained(path)
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**config, **more}))
        config |= {**family.head, "architectures": [family.architecture]}
        (self.head_directory / "config.json").write_text(json.dumps(config))
        stored = load_file(self.head_directory / "model.safetensors")
        tensors = {"model.fc.weight": self.fc.weight.data}
        for name, tensor in stored.items():
            if "layers." in name:
                tensors[name.replace("layers", family.layers)] = tensor
            elif self.has_table or (family.has_norm and name == "model.norm.weight"):
                tensors[name] = tensor
        for name, norm in zip(family.norms or (), self.norms, strict=True):
            tensors[f"model.{name}.weight"] = norm.weight.data
        save_file(tensors, self.head_directory / "model.safetensors", {"format": "pt"})
        return folder / "model"

    def decode(self, hidden: Tensor) -> Tensor:
        """Compute the layers, and the norm after them."""
        inner = self.source.model
        count = hidden.shape[1]
        places = torch.arange(count)
        is_later = places[None] > places[:, None]
        for index, layer in enumerate(inner.layers):
            kinds = getattr(self.source.config, "layer_types", None)
            is_chunked = bool(kinds) and kinds[index] == "chunked_attention"
            is_apart = is_chunked * (places[None] // CHUNK != places[:, None] // CHUNK)
            mask = torch.zeros(count, count).masked_fill(is_later | is_apart, -torch.inf)
            out = layer(
                hidden,
                attention_mask=mask[None, None],
                position_ids=places[None],
                position_embeddings=inner.rotary_emb(hidden, places[None]),
            )
            hidden = out[0] if isinstance(out, tuple) else out
        return inner.norm(hidden) if self.family.has_norm else hidden

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the drafts after these tokens."""
        family = self.family
        model = self.source if self.has_table else self.model
        prompt = torch.tensor([tokens[:-1]])
        given = self.model(prompt, output_hidden_states=True).hidden_states[-1] * family.given
        ids = tokens[1:]
        for _ in range(count):
            embedded = model.get_input_embeddings()(torch.tensor([ids])) * family.embedding
            parts = [embedded, given]
            if family.norms:
                parts = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
            last = self.decode(self.fc(torch.cat(parts, -1)))[:, -1:] * family.given
            ids = [*ids, int(model.lm_head(last).argmax())]
            given = torch.cat([given, last], 1)
        return ids[len(tokens) - 1 :]

    def change(self, edit: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
        """Edit the config and the tensors of the head."""
        path = self.head_directory
        config = json.loads((path / "config.json").read_text())
        tensors = load_file(path / "model.safetensors")
        edit(config, tensors)
        (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors", {"format": "pt"})

    def drafting(self) -> dict[str, Any]:
        """Return the settings of an engine that drafts with the head."""
        config = {
            "method": "eagle",
            "model": str(self.head_directory),
            "num_speculative_tokens": 3,
            "adaptive_length": False,
        }
        return {"speculative_config": config, "disable_log_stats": False}
