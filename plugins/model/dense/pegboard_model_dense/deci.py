"""DeciLM (Bercovich et al. 2024): layers with their own sizes, or without a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.errors import ModelError
from pegboard.layers import read
from pegboard_model_dense.architecture import Architecture, LayerSizes
from pegboard_model_dense.config import common, is_on, refuse
from pegboard_model_dense.decoder import Decoder


class Deci(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        blocks = config.get("block_configs")
        if not isinstance(blocks, list):
            counts: Any = read(config, "num_key_value_heads_per_layer", list)
            model = common({**config, "num_key_value_heads": None})
            if (
                not counts
                or len(counts) != len(model.layers)
                or not all(isinstance(count, int) for count in counts)
            ):
                raise ModelError(
                    "the checkpoint's config has neither block_configs nor "
                    "num_key_value_heads_per_layer for each layer"
                )
            layers = tuple(
                replace(layer, num_kv_heads=n)
                for layer, n in zip(model.layers, counts, strict=True)
            )
            return replace(model, layers=layers)
        model = common({"intermediate_size": 0, "num_key_value_heads": None, **config})
        if len(blocks) != len(model.layers):
            raise ModelError(
                f"block_configs has {len(blocks)} entries for {len(model.layers)} layers"
            )
        return replace(model, layers=tuple(deci_layer(block, model) for block in blocks))


def deci_layer(block: Any, model: Architecture) -> LayerSizes:
    attention, mlp = (
        block.get(name) if isinstance(block, Mapping) else None for name in ("attention", "ffn")
    )
    if not isinstance(attention, Mapping) or not isinstance(mlp, Mapping):
        raise ModelError(f"block_configs has {block!r}; expected an object with attention and ffn")
    refuse(attention, {"replace_with_linear": False})
    refuse(mlp, {"replace_with_linear": False})
    group = read(attention, "n_heads_in_group", int)
    factor = read(mlp, "ffn_mult", float)
    heads = 0 if is_on(attention, "no_op") else model.num_heads // (group or 1)
    exact = int(2 * (factor or 0) * model.hidden_size / 3)
    return LayerSizes(heads, 0 if is_on(mlp, "no_op") else -(-exact // 256) * 256)
