"""The values of a checkpoint's config that models of this package read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard.layers import read, size_of
from pegboard_models.decoder import DecoderSizes
from pegboard_models.rope import rope_parameters


class Shape(DecoderSizes):
    """The sizes from a checkpoint's config, under uniform names."""

    def __init__(self, config: Mapping[str, Any], *, is_tied: bool = False) -> None:
        super().__init__(config, is_tied=is_tied)
        self.intermediate_size = size_of(config, "intermediate_size")
        self.num_heads = size_of(config, "num_attention_heads")
        self.q_rank = read(config, "q_lora_rank", int)
        self.rank = size_of(config, "kv_lora_rank")
        self.nope_dim = size_of(config, "qk_nope_head_dim")
        self.rope_dim = size_of(config, "qk_rope_head_dim")
        self.value_dim = read(config, "v_head_dim", int) or self.hidden_size // self.num_heads
        self.max_positions = read(config, "max_position_embeddings", int) or 2048
        self.activation = read(config, "hidden_act", str) or "silu"
        self.bias = bool(read(config, "attention_bias", bool))
        self.mlp_bias = bool(read(config, "mlp_bias", bool))
        sizes = (self.num_heads, self.rank, self.nope_dim, self.rope_dim, self.value_dim)
        if min(sizes) < 1 or self.rope_dim % 2:
            message = (
                "num_attention_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim (even) and "
                "v_head_dim"
            )
            raise ModelError(
                f"the checkpoint's config has {list(sizes)} as {message}; all must be positive"
            )

    def scale(self, config: Mapping[str, Any]) -> float:
        """Return the factor of q·k. YaRN with `mscale_all_dim` makes it larger (Peng et al. 2023;
        DeepSeek-V2)."""
        _, scaling = rope_parameters(config)
        scale = (self.nope_dim + self.rope_dim) ** -0.5
        all_dim = read(scaling, "mscale_all_dim", float)
        factor = read(scaling, "factor", float) or 1.0
        return (
            scale * (0.1 * all_dim * math.log(factor) + 1.0) ** 2
            if all_dim and factor > 1
            else scale
        )


def sparse_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return which layers have experts."""
    if config.get("mlp_layer_types") is not None:
        return kinds(config, "mlp_layer_types", num_layers, "dense", "sparse")
    first = read(config, "first_k_dense_replace", int) or 0
    every = read(config, "moe_layer_freq", int) or 1
    return [index >= first and index % every == 0 for index in range(num_layers)]


def kinds(config: Mapping[str, Any], name: str, num_layers: int, no: str, yes: str) -> list[bool]:
    """Return which layers are `yes` in the list `name` of the config, which has `no` or `yes` for
    each layer."""
    names = read(config, name, list[str])
    if names is None or len(names) != num_layers or any(kind not in (no, yes) for kind in names):
        raise ModelError(
            f"the checkpoint's config has {name}={names}; expected {no!r} or {yes!r} for each of "
            f"{num_layers} layers"
        )
    return [kind == yes for kind in names]
