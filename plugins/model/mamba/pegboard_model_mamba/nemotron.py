"""Nemotron-H (NVIDIA 2025). A layer is either Mamba-2, attention without positions, or a feed-forward block with squared ReLU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Linear, read, size_of
from pegboard_model_mamba.decoder import Block, Names, SelfAttention, StateDecoder
from pegboard_model_mamba.mixers import Mamba2, Mamba2Shape

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of the older way to give the kinds of all layers."""

OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


class NemotronHModel(StateDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        hidden, eps = size_of(config, "hidden_size"), read(config, "layer_norm_epsilon", float) or 1e-5
        kinds, bias = layer_kinds(config), bool(read(config, "mlp_bias", bool))
        if (act := read(config, "mlp_hidden_act", str) or "relu2") != "relu2":
            raise ModelError(f"the checkpoint's config has mlp_hidden_act={act!r}; this architecture is served with relu2")
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
            limits=(read(config, "time_step_min", float) or 0.0, math.inf),
        )
        head_dim = read(config, "head_dim", int) or read(config, "attention_head_dim", int)
        attention = {**config, "head_dim": head_dim, "attention_bias": False}

        def make(build: Build, index: int) -> nn.Module:
            own, part = build.at("mixer"), nn.Module()
            if kinds[index] == "linear_attention":
                part = Mamba2(own, index, shape)
            elif kinds[index] == "full_attention":
                part = SelfAttention(own, index, attention)
            else:
                part = SquaredReLU(own, hidden, size_of(config, "intermediate_size"), bias)
            return Block(build, hidden, eps, [("norm", part)])

        names = Names("backbone", "embeddings", "norm_f")
        super().__init__({**config, "num_hidden_layers": len(kinds)}, build, make, eps=eps, names=names)


class SquaredReLU(nn.Module):
    """[T, hidden] → [T, hidden]: down(relu(up(x))²)."""

    def __init__(self, build: Build, hidden: int, width: int, bias: bool) -> None:
        super().__init__()
        self.up_proj = Linear(build.at("up_proj"), hidden, width, bias=bias)
        self.down_proj = Linear(build.at("down_proj"), width, hidden, bias=bias)

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        up = self.up_proj(hidden).relu()
        out: Tensor = self.down_proj(up * up)
        return out


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer. The config has a list, or a text with a letter for each. Raises ModelError if a kind is not
    served."""
    pattern = read(config, "hybrid_override_pattern", str) or ""
    named = read(config, "layers_block_type", list[str]) or [PATTERN.get(letter, letter) for letter in pattern]
    kinds = [OLDER.get(kind, kind) for kind in named]
    served = ("linear_attention", "full_attention", "mlp")
    if not kinds or not set(kinds) <= set(served):
        told = f"served are {', '.join(served)}; experts without a gate (moe) are not served yet"
        raise ModelError(f"the checkpoint's config has layers of the kinds {sorted(set(kinds))}; {told}")
    return kinds
