"""Nemotron-H and Nemotron 3 (NVIDIA 2025). A layer is either Mamba-2, attention without positions,
a feed-forward block with squared ReLU, or experts of the same form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Experts, Linear, Rope, RouterRule, read, size_of
from pegboard_model_mamba.decoder import StateDecoder, attention, block
from pegboard_model_mamba.mixers import Mamba2, Mamba2Shape
from pegboard_models.decoder import Names

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of the older way to give the kinds of all layers."""

OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


class NemotronHModel(StateDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        hidden = size_of(config, "hidden_size")
        eps = read(config, "layer_norm_epsilon", float) or 1e-5
        kinds = layer_kinds(config)
        bias = bool(read(config, "mlp_bias", bool))
        if (act := read(config, "mlp_hidden_act", str) or "relu2") != "relu2":
            raise ModelError(
                f"the checkpoint's config has mlp_hidden_act={act!r}; this architecture is served "
                "with relu2"
            )
        least = read(config, "time_step_min", float)
        shape = Mamba2Shape(
            hidden=hidden,
            heads=size_of(config, "mamba_num_heads"),
            head_dim=size_of(config, "mamba_head_dim"),
            groups=read(config, "n_groups", int) or 8,
            state=size_of(config, "ssm_state_size"),
            width=read(config, "conv_kernel", int) or 4,
            bias=bool(read(config, "use_bias", bool)),
            conv_bias=read(config, "use_conv_bias", bool) is not False,
            out_bias=bool(read(config, "use_bias", bool)),
            eps=eps,
            limits=(0.001 if least is None else least, math.inf),
        )
        head_dim = read(config, "head_dim", int) or read(config, "attention_head_dim", int)
        attention_config = {**config, "head_dim": head_dim, "attention_bias": False}

        def make(build: Build, index: int, rope: Rope | None) -> nn.Module:
            mixer = build.at("mixer")
            part = nn.Module()
            if kinds[index] == "linear_attention":
                part = Mamba2(mixer, index, shape)
            elif kinds[index] == "full_attention":
                part = attention(mixer, index, attention_config)
            elif kinds[index] == "moe":
                part = LatentExperts(mixer, config, bias)
            else:
                part = SquaredReLU(mixer, hidden, size_of(config, "intermediate_size"), bias)
            return block(build, hidden, eps, ("norm", part))

        names = Names("backbone", "embeddings", norm="norm_f")
        # what transformers calls it
        build.declared.aliases[build.at("model").path] = build.at("backbone").path
        super().__init__(
            {**config, "num_hidden_layers": len(kinds)}, build, make, eps=eps, names=names
        )


class SquaredReLU(nn.Module):
    """[T, hidden] → [T, hidden]: down(relu(up(x))²)."""

    def __init__(self, build: Build, hidden: int, width: int, bias: bool) -> None:
        super().__init__()
        self.up_proj = Linear(build.at("up_proj"), hidden, width, bias=bias, split="rows")
        self.down_proj = Linear(build.at("down_proj"), width, hidden, bias=bias, split="columns")

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        up = self.up_proj(hidden).relu()
        out: Tensor = self.down_proj(up * up)
        return out


class LatentExperts(nn.Module):
    """[T, hidden] → [T, hidden]: experts and a shared expert. The chosen experts may compute fewer
    channels, between two projections that they share."""

    def __init__(self, build: Build, config: Mapping[str, Any], bias: bool) -> None:
        super().__init__()
        hidden = size_of(config, "hidden_size")
        latent = read(config, "moe_latent_size", int)
        num_experts = size_of(config, "n_routed_experts")
        width = size_of(config, "moe_intermediate_size")
        rule = RouterRule(
            size_of(config, "num_experts_per_tok"),
            score="sigmoid",
            renormalize=read(config, "norm_topk_prob", bool) is not False,
            scale=read(config, "routed_scaling_factor", float) or 1.0,
            num_groups=read(config, "n_group", int) or 1,
            top_groups=read(config, "topk_group", int) or 1,
            group_best=2,
        )
        self.gate = Linear(build.at("gate"), hidden, num_experts, is_router=True)
        self.before = self.after = None
        if latent:
            self.before = Linear(build.at("fc1_latent_proj"), hidden, latent, bias=bias)
            self.after = Linear(build.at("fc2_latent_proj"), latent, hidden, bias=bias)
        correction = f"{build.path}.gate.e_score_correction_bias"
        names = ("up_proj", "down_proj")
        self.experts = Experts(
            build.at("experts"),
            num_experts,
            latent or hidden,
            width,
            rule=rule,
            activation="relu2",
            names=names,
            correction=correction,
        )
        shared = size_of(config, "moe_shared_expert_intermediate_size")
        self.shared = SquaredReLU(build.at("shared_experts"), hidden, shared, bias)

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        logits = self.gate(hidden)
        shared = self.shared.forward(hidden)
        if self.before is None or self.after is None:
            return self.experts(hidden, logits, shared)
        return self.after(self.experts(self.before(hidden), logits)) + shared


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer. The config has a list, or a text with a letter for each.
    Raises ModelError if a kind is not served."""
    pattern = read(config, "hybrid_override_pattern", str) or ""
    named = read(config, "layers_block_type", list[str]) or [
        PATTERN.get(letter, letter) for letter in pattern
    ]
    kinds = [OLDER.get(kind, kind) for kind in named]
    if not kinds or not set(kinds) <= set(PATTERN.values()):
        message = f"served are {', '.join(PATTERN.values())}"
        raise ModelError(
            f"the checkpoint's config has layers of the kinds {sorted(set(kinds))}; {message}"
        )
    return kinds
