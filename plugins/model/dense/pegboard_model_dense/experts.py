"""Families with experts. Apart from these, they are like families of the other modules.

Granite MoE      Granite with experts, and with a shared one (IBM 2024)
GLM-4.5          sigmoid scores in groups, shared experts, a dense first layer (GLM-4.5 Team 2025);
dots.llm1 and Ling 2.0 alike MiniMax-M2       sigmoid scores, queries and keys normalized as a whole
(MiniMax 2025) ERNIE 4.5        softmax scores with a correction, shared experts (Baidu 2025)
AFMoE (Trinity)  sigmoid scores, gated attention, windows, layers without rotation (Arcee 2025)
Phi-3.5-MoE      LayerNorm, biases, experts chosen one after the other (Abdin et al. 2024)
FlexOlmo         OLMo 2 with experts (Shi et al. 2025)
Hunyuan-A13B     a shared expert; queries and keys are normalized after their rotation (Tencent
2025) DBRX             LayerNorm without biases; queries, keys and values are limited (Databricks
2024) DeepSeekMoE, Ling   softmax scores, shared experts (Dai et al. 2024; Ling Team 2025)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from pegboard.errors import ModelError
from pegboard.layers import RouterRule, read, size_of
from pegboard_model_dense.current import Ernie, Granite, Olmo2, windowed
from pegboard_model_dense.decoder import Decoder
from pegboard_model_dense.traits import (
    ExpertTraits,
    Names,
    RopeTraits,
    Traits,
    common,
    refuse,
    renamed,
    types_of_layers,
)
from pegboard_models.sparse_mixer import SparseMixer


def with_experts(
    traits: Traits, own: ExpertTraits, has_experts: Callable[[int], bool] | None = None
) -> Traits:
    """Return the traits with experts in the layers for whose index has_experts returns True; None =
    in all."""
    layers = enumerate(traits.layers)
    return replace(
        traits,
        layers=tuple(
            replace(layer, experts=own) if has_experts is None or has_experts(index) else layer
            for index, layer in layers
        ),
    )


def after_the_first(config: Mapping[str, Any]) -> Callable[[int], bool]:
    """Return which layers have experts: all after the first few, or every so many of them."""
    dense = read(config, "first_k_dense_replace", int) or 0
    every = read(config, "moe_layer_freq", int) or 1
    return lambda index: index >= dense and index % every == 0


def number_of_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts, which has several names."""
    names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    return size_of(config, next((name for name in names if config.get(name) is not None), names[0]))


def rule_of(
    config: Mapping[str, Any],
    *,
    score: Literal["softmax", "sigmoid"],
    renormalize: bool | None = None,
    top_k: int | None = None,
) -> RouterRule:
    """Return how experts are chosen. renormalize, top_k: None = as the config says. With sigmoid
    scores, groups count by their two best experts (DeepSeek-V3). Raises ModelError if the groups do
    not fit."""
    count = number_of_experts(config)
    top_k = top_k or size_of(config, "num_experts_per_tok")
    renormalize = bool(read(config, "norm_topk_prob", bool)) if renormalize is None else renormalize
    groups = (read(config, "n_group", int) or 1) if score == "sigmoid" else 1
    chosen = read(config, "topk_group", int) or groups
    if groups > 1 and (
        count % groups
        or count < 2 * groups
        or not 0 < chosen <= groups
        or top_k > chosen * (count // groups)
    ):
        raise ModelError(
            f"{top_k} of {count} experts cannot be chosen from {chosen} of {groups} groups"
        )
    scale = read(config, "routed_scaling_factor", float) or 1.0
    if groups == 1:
        return RouterRule(top_k, score, renormalize, scale)
    return RouterRule(top_k, score, renormalize, scale, groups, chosen, group_best=2)


class GraniteMoe(Granite):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        traits = Granite.traits(config)
        own = ExpertTraits(
            count=number_of_experts(config),
            width=size_of(config, "intermediate_size"),
            rule=rule_of(config, score="softmax", renormalize=True),
            router="block_sparse_moe.router.layer",
            modules="block_sparse_moe",
            names=("gate_proj", "up_proj", "output_linear"),
            merged="input_linear",
            shared="shared_mlp",
            shared_width=read(config, "shared_intermediate_size", int) or 0,
        )
        names = replace(traits.names, up=("input_linear",), down="output_linear")
        return with_experts(replace(traits, names=names), own)


class Glm4Moe(Decoder):
    """Also dots.llm1, with normalized queries and keys, and windows on some layers."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        is_dots = config.get("model_type") == "dots1"
        bias = bool(read(config, "attention_bias", bool))
        normalizes = is_dots or bool(read(config, "use_qk_norm", bool))
        base = {"rms_norm_eps": 1e-6 if is_dots else 1e-5, **config}
        traits = common(
            base,
            partial=1.0 if is_dots else 0.5,
            qk_norm="heads" if normalizes else "",
            qkv_bias=bias,
            out_bias=bias and is_dots,
        )
        window = read(config, "sliding_window", int)
        if is_dots and window and read(config, "use_sliding_window", bool) is not False:
            first = read(config, "max_window_layers", int) or 0
            default = [
                "full_attention" if i < first else "sliding_attention"
                for i in range(len(traits.layers))
            ]
            traits = replace(
                traits, layers=windowed(traits, types_of_layers(config, default), window)
            )
        width = size_of(config, "moe_intermediate_size")
        own = ExpertTraits(
            count=number_of_experts(config),
            width=width,
            rule=rule_of(config, score="sigmoid"),
            correction="mlp.gate.e_score_correction_bias",
            shared_width=width * (read(config, "n_shared_experts", int) or 0),
        )
        return with_experts(traits, own, after_the_first(config))


class MiniMaxM2(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(
            config, {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}
        )
        base = {"rope_theta": 5_000_000.0, "head_dim": 128, **config}
        share = (read(config, "rotary_dim", int) or size_of(base, "head_dim")) / size_of(
            base, "head_dim"
        )
        own = ExpertTraits(
            count=number_of_experts(config),
            width=size_of(config, "intermediate_size"),
            rule=rule_of(config, score="sigmoid", renormalize=True),
            router="block_sparse_moe.gate",
            modules="block_sparse_moe.experts",
            names=("w1", "w3", "w2"),
            correction="block_sparse_moe.e_score_correction_bias",
        )
        return with_experts(common(base, partial=share, qk_norm="all"), own)


class ErnieMoe(Ernie):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        base = {"head_dim": None, **config}
        traits = Ernie.traits(base)
        width = size_of(config, "moe_intermediate_size")
        first = read(config, "moe_layer_start_index", int) or 0
        every = read(config, "moe_layer_interval", int) or 1
        last = read(config, "moe_layer_end_index", int)
        last = len(traits.layers) - 1 if last is None or last < 0 else last
        own = ExpertTraits(
            count=number_of_experts(config),
            width=width,
            rule=rule_of(
                config, score="softmax", renormalize=True, top_k=read(config, "moe_k", int)
            ),
            correction="mlp.moe_statics.e_score_correction_bias",
            shared_width=width * (read(config, "moe_num_shared_experts", int) or 0),
        )
        traits = replace(traits, head_bias=bool(read(config, "use_bias", bool)))
        return with_experts(
            traits, own, lambda index: first <= index <= last and (index + 1) % every == 0
        )


class Afmoe(Decoder):
    """Attention's results have a gate. Most layers have a window, and only these rotate."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"score_func": "sigmoid", "n_group": 1, "topk_group": 1})
        names = Names(
            after_attention="post_attention_layernorm",
            before_mlp="pre_mlp_layernorm",
            after_mlp="post_mlp_layernorm",
            gate="gate_proj",
        )
        bias = bool(read(config, "attention_bias", bool))
        base = {"head_dim": 128, "rms_norm_eps": 1e-5, **config}
        traits = common(base, names=names, qk_norm="heads", qkv_bias=bias, out_bias=bias)
        every = read(config, "global_attn_every_n_layers", int) or 4
        window = read(config, "sliding_window", int) or 1024
        default = [
            "sliding_attention" if (i + 1) % every else "full_attention"
            for i in range(len(traits.layers))
        ]
        layers = windowed(traits, types_of_layers(config, default), window)
        scale = read(config, "route_scale", float)
        dense = read(config, "num_dense_layers", int)
        width = size_of(config, "moe_intermediate_size")
        own = ExpertTraits(
            count=number_of_experts(config),
            width=width,
            rule=RouterRule(
                size_of(config, "num_experts_per_tok"),
                "sigmoid",
                renormalize=read(config, "route_norm", bool) is not False,
                scale=1.0 if scale is None else scale,
            ),
            router="mlp.router.gate",
            correction="mlp.expert_bias",
            shared_width=width * (read(config, "num_shared_experts", int) or 0),
        )
        traits = replace(
            traits,
            layers=tuple(replace(each, rope=None if each.window is None else 0) for each in layers),
            embedding_scale=traits.hidden_size**0.5 if read(config, "mup_enabled", bool) else 1.0,
        )
        return with_experts(traits, own, lambda index: index >= (1 if dense is None else dense))


class PhiMoe(Decoder):
    """LayerNorm and biases, and experts that SparseMixer chooses."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"num_experts_per_tok": 2})
        base = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, **config}
        bias = bool(read(config, "attention_bias", bool))
        window = read(config, "sliding_window", int)
        traits = common(
            base,
            norm="layer",
            qkv_bias=bias,
            out_bias=bias,
            head_bias=bool(read(config, "lm_head_bias", bool)),
        )
        jitter = read(config, "router_jitter_noise", float)
        own = ExpertTraits(
            count=number_of_experts(config),
            width=size_of(config, "intermediate_size"),
            rule=SparseMixer(2, jitter=0.01 if jitter is None else jitter),
            router="block_sparse_moe.gate",
            modules="block_sparse_moe.experts",
            names=("w1", "w3", "w2"),
        )
        layers = windowed(traits, ["sliding_attention"] * len(traits.layers), window)
        return with_experts(
            replace(traits, layers=layers, ropes=(_with_own_magnitude(traits),)), own
        )


def _with_own_magnitude(traits: Traits) -> RopeTraits:
    """Return the rotary embedding with Phi-3.5-MoE's factor of cos and sin, which belongs to the
    long or to the short factors of LongRoPE. Raises ModelError if the config does not have it."""
    rope = traits.ropes[0]
    if rope.scaling.get("rope_type", rope.scaling.get("type", "default")) == "default":
        return rope
    original = read(rope.scaling, "original_max_position_embeddings", int) or traits.max_positions
    name = "long_mscale" if traits.max_positions > original else "short_mscale"
    magnitude = read(rope.scaling, name, float)
    if magnitude is None:
        raise ModelError(
            f"the checkpoint's config scales its rotary embedding without {name}; this "
            "architecture needs a number"
        )
    return replace(rope, scaling={**rope.scaling, "attention_factor": magnitude})


class FlexOlmo(Olmo2):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        width = size_of(config, "intermediate_size")
        own = ExpertTraits(
            count=number_of_experts(config), width=width, rule=rule_of(config, score="softmax")
        )
        base = {"rope_theta": 500_000.0, "rms_norm_eps": 1e-6, **config}
        return with_experts(Olmo2.traits(base), own)


class HunYuanMoe(Decoder):
    """Some values of the config are lists with one value for each layer."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(
            config,
            {"use_cla": False, "use_mla": False, "use_qk_norm": True, "moe_layer_num_skipped": 0},
        )
        base = {"rms_norm_eps": 1e-5, **renamed(config, head_dim="attention_head_dim")}
        bias = bool(read(config, "attention_bias", bool))
        mlp_bias = bool(read(config, "mlp_bias", bool))
        names = Names(q_norm="query_layernorm", k_norm="key_layernorm")
        traits = common(
            base,
            names=names,
            qk_norm="rotated",
            qkv_bias=bias,
            out_bias=bias,
            up_bias=mlp_bias,
            down_bias=mlp_bias,
        )
        width = size_of(config, "intermediate_size")

        def own(index: int) -> ExpertTraits:
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
            return ExpertTraits(
                count=size_of(values, "num_experts"),
                width=inner or width,
                rule=RouterRule(top_k, renormalize=True),
                router="mlp.gate.wg",
                shared="mlp.shared_mlp",
                shared_width=width * shared,
            )

        return replace(
            traits,
            layers=tuple(replace(layer, experts=own(i)) for i, layer in enumerate(traits.layers)),
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


class Bailing(Decoder):
    """Ling. The second version has sigmoid scores, and normalizes queries and keys."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"norm_head": False, "multi_gate": False, "router_type": "topN"})
        bias = bool(read(config, "use_bias", bool))
        names = Names(
            embedding="model.word_embeddings",
            attention="attention",
            qkv=("query_key_value",),
            out="dense",
            q_norm="query_layernorm",
            k_norm="key_layernorm",
        )
        told = config.get("score_function")
        score: Literal["softmax", "sigmoid"] = "sigmoid" if told == "sigmoid" else "softmax"
        if told not in (None, score):
            raise ModelError(
                f"the checkpoint's config has score_function={told!r}; expected softmax or sigmoid"
            )
        traits = common(
            config,
            names=names,
            qk_norm="heads" if read(config, "use_qk_norm", bool) else "",
            qkv_bias=bias or bool(read(config, "use_qkv_bias", bool)),
            out_bias=bias,
            up_bias=bias,
            down_bias=bias,
        )
        width = size_of(config, "moe_intermediate_size")
        corrects = bool(read(config, "moe_router_enable_expert_bias", bool))
        shared = read(config, "moe_shared_expert_intermediate_size", int) or width
        own = ExpertTraits(
            count=number_of_experts(config),
            width=width,
            rule=rule_of(config, score=score),
            correction="mlp.gate.expert_bias" if corrects else "",
            shared_width=shared * (read(config, "num_shared_experts", int) or 0),
        )
        return with_experts(traits, own, after_the_first(config))


class DeepSeekMoe(Decoder):
    """The first DeepSeek with experts, which has ordinary attention."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"scoring_func": "softmax"})
        bias = bool(read(config, "attention_bias", bool))
        width = size_of(config, "moe_intermediate_size")
        own = ExpertTraits(
            count=number_of_experts(config),
            width=width,
            rule=rule_of(config, score="softmax"),
            shared_width=width * (read(config, "n_shared_experts", int) or 0),
        )
        return with_experts(
            common(config, qkv_bias=bias, out_bias=bias), own, after_the_first(config)
        )


class Dbrx(Decoder):
    """Its experts' matrices are stored below each other."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        attention, blocks = (_section(config, name) for name in ("attn_config", "ffn_config"))
        activation = _section(blocks, "ffn_act_fn")
        own = renamed(
            config,
            hidden_size="d_model",
            num_hidden_layers="n_layers",
            num_attention_heads="n_heads",
            max_position_embeddings="max_seq_len",
        )
        own |= {
            "num_key_value_heads": read(attention, "kv_n_heads", int),
            "intermediate_size": read(blocks, "ffn_hidden_size", int),
            "hidden_act": read(activation, "name", str) or "silu",
            "rms_norm_eps": 1e-5,
        }
        if own.get("rope_parameters") is None:
            own["rope_theta"] = read(attention, "rope_theta", float) or 10000.0
        norm = blocks.get("moe_normalize_expert_weights", 1)
        refuse({"moe_normalize_expert_weights": norm}, {"moe_normalize_expert_weights": 1})
        names = Names(
            embedding="transformer.wte",
            layers="transformer.blocks",
            norm="transformer.norm_f",
            before_attention="norm_attn_norm.norm_1",
            before_mlp="norm_attn_norm.norm_2",
            attention="norm_attn_norm.attn",
            qkv=("Wqkv",),
            out="out_proj",
        )
        traits = common(
            own, names=names, norm="layer, no bias", qkv_limit=read(attention, "clip_qkv", float)
        )
        experts = ExpertTraits(
            count=size_of(blocks, "moe_num_experts"),
            width=size_of(blocks, "ffn_hidden_size"),
            rule=RouterRule(size_of(blocks, "moe_top_k"), renormalize=norm is not None),
            router="ffn.router.layer",
            modules="ffn.experts.mlp",
            names=("w1", "v1", "w2"),
        )
        return with_experts(traits, experts)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of the config; {} = it has none. Raises ModelError if it is something else."""
    part = config.get(name) or {}
    if not isinstance(part, Mapping):
        raise ModelError(f"the checkpoint's config has {name}={part!r}; expected an object")
    return part
