"""Hunyuan (Tencent 2025): queries and keys are normalized after their rotation. A13B has
experts and a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.errors import ModelError
from pegboard.layers import RouterRule, read, size_of
from pegboard_model_dense.architecture import Architecture, ExpertSizes, Names
from pegboard_model_dense.attention import RotatedFirst, SelfAttention
from pegboard_model_dense.config import common, refuse, renamed
from pegboard_model_dense.decoder import Decoder
from pegboard_models.norms import each_head


class HunYuan(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"use_cla": False})
        base = {"rms_norm_eps": 1e-5, **renamed(config, head_dim="attention_head_dim")}
        bias = bool(read(config, "attention_bias", bool))
        mlp_bias = bool(read(config, "mlp_bias", bool))
        normalizes = read(config, "use_qk_norm", bool) is not False
        names = Names(q_norm="query_layernorm", k_norm="key_layernorm")
        return common(
            base,
            names=names,
            attention=RotatedFirst if normalizes else SelfAttention,
            head_norm=each_head if normalizes else None,
            qkv_bias=bias,
            out_bias=bias,
            up_bias=mlp_bias,
            down_bias=mlp_bias,
        )


class HunYuanMoe(Decoder):
    """Some values of the config are lists with one value for each layer."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(
            config,
            {"use_cla": False, "use_mla": False, "use_qk_norm": True, "moe_layer_num_skipped": 0},
        )
        base = {"rms_norm_eps": 1e-5, **renamed(config, head_dim="attention_head_dim")}
        bias = bool(read(config, "attention_bias", bool))
        mlp_bias = bool(read(config, "mlp_bias", bool))
        names = Names(q_norm="query_layernorm", k_norm="key_layernorm")
        model = common(
            base,
            names=names,
            attention=RotatedFirst,
            head_norm=each_head,
            qkv_bias=bias,
            out_bias=bias,
            up_bias=mlp_bias,
            down_bias=mlp_bias,
        )
        width = size_of(config, "intermediate_size")

        def experts(index: int) -> ExpertSizes:
            values = {
                name: _of_layer(config.get(name), index)
                for name in ("num_experts", "moe_topk", "num_shared_expert")
            }
            top_k = size_of(values, "moe_topk")
            shared = (
                1 if values["num_shared_expert"] is None else size_of(values, "num_shared_expert")
            )
            inner = read(
                {"width": _of_layer(config.get("moe_intermediate_size"), index)}, "width", int
            )
            return ExpertSizes(
                count=size_of(values, "num_experts"),
                width=inner or width,
                rule=RouterRule(top_k, renormalize=True),
                router="mlp.gate.wg",
                shared="mlp.shared_mlp",
                shared_width=width * shared,
            )

        return replace(
            model,
            layers=tuple(
                replace(layer, experts=experts(i)) for i, layer in enumerate(model.layers)
            ),
        )


def _of_layer(value: Any, index: int) -> Any:
    """Return a layer's own value of a list, or the value that all layers have. Raises ModelError if
    the list is too short."""
    if not isinstance(value, list):
        return value
    if index >= len(value):
        raise ModelError(
            f"the checkpoint's config has {value} for its layers; layer {index} has no value"
        )
    return value[index]
