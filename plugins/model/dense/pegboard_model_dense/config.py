"""What configs of checkpoints say, in terms of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from pegboard.errors import ModelError
from pegboard.layers import Head, Norm, RouterRule, read, size_of
from pegboard_model_dense.architecture import Architecture, ExpertSizes, LayerSizes, Names, Rotary
from pegboard_model_dense.attention import SelfAttention
from pegboard_model_dense.blocks import GatedMLP, pre_norm
from pegboard_model_dense.rows import ArrangedQKV
from pegboard_models.blocks import heads_of
from pegboard_models.rope import rope_parameters

BOTH_NORMS = Names(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


KINDS = ("sliding_attention", "full_attention")


def renamed(config: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Return the config with values under the names of Llama's config. names: the new name = the
    config's. A value that the config has under Llama's name stays."""
    return {**{new: config[old] for new, old in names.items() if old in config}, **config}


def common(
    config: Mapping[str, Any],
    *,
    partial: float = 1.0,
    pairs: bool = False,
    bias: bool = False,
    **more: Any,
) -> Architecture:
    """Return the architecture that a config in Llama's terms gives: sizes, windows of all layers,
    one rotary embedding. partial: share of each head that is rotated, if the config does not say.
    bias: whether the matrices of attention and of the feed-forward block have one. more: its other
    values, which replace these. Raises ModelError if a value is missing or does not fit."""
    hidden_size = size_of(config, "hidden_size")
    num_heads, num_kv_heads, head_dim = heads_of(config)
    num_layers = size_of(config, "num_hidden_layers")
    width = size_of(config, "intermediate_size")
    base, scaling = rope_parameters(config)
    share = scaling.get("partial_rotary_factor", read(config, "partial_rotary_factor", float))
    rotated = int(head_dim * float(partial if share is None else share))
    values: dict[str, Any] = {
        "layers": (LayerSizes(num_kv_heads, width),) * num_layers,
        "norm": Norm,
        "block": pre_norm,
        "attention": SelfAttention,
        "qkv": ArrangedQKV,
        "head_norm": None,
        "mlp": GatedMLP,
        "head": Head,
        "ropes": (Rotary(base, scaling, rotated, pairs),),
        "eps": read(config, "rms_norm_eps", float) or 1e-6,
        "activation": read(config, "hidden_act", str) or "silu",
        "is_tied": bool(read(config, "tie_word_embeddings", bool)),
        **dict.fromkeys(("qkv_bias", "out_bias", "up_bias", "down_bias"), bias),
        **more,
    }
    norm = values["norm"]
    return Architecture(
        after_norms=values.pop("after_norms", (norm, norm)),
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=head_dim,
        vocab_size=size_of(config, "vocab_size"),
        max_positions=read(config, "max_position_embeddings", int) or 2048,
        **values,
    )


def is_on(config: Mapping[str, Any], *names: str) -> bool:
    """Return whether one of these values is true."""
    return any(read(config, name, bool) for name in names)


def refuse(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ModelError if the config has one of these names with another value. expected: the value
    that the model computes."""
    for name, value in expected.items():
        if config.get(name) not in (None, value):
            raise ModelError(
                f"the checkpoint's config has {name}={config[name]!r}; this architecture is "
                f"served with {value!r} only"
            )


def windows_by_type(
    config: Mapping[str, Any],
    model: Architecture,
    window: int | None,
    is_full: Callable[[int], bool] = lambda index: True,
) -> tuple[LayerSizes, ...]:
    """Return the layers with a window, in tokens, for those of type "sliding_attention". The other
    type in `layer_types` is "full_attention". is_full: which layers have it if the config has no
    types. Raises ModelError if there are too few."""
    count = len(model.layers)
    types = read(config, "layer_types", list[str])
    types = types or [KINDS[is_full(index)] for index in range(count)]
    if len(types) < count or not {*KINDS}.issuperset(types):
        raise ModelError(
            f"layer_types has {len(types)} entries for {count} layers: "
            f"{sorted(map(str, set(types)))}; expected one for each layer, full_attention or "
            "sliding_attention"
        )
    return windowed(model, types[:count], window)


def windowed(model: Architecture, types: list[str], window: int | None) -> tuple[LayerSizes, ...]:
    """Return the layers with a window, in tokens, for those of type "sliding_attention"."""
    return tuple(
        replace(layer, window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(model.layers, types, strict=True)
    )


def ropes_of_types(
    config: Mapping[str, Any], model: Architecture, local: Mapping[str, Any]
) -> tuple[Rotary, ...]:
    """Return the rotary embeddings of full and of sliding attention. They are given by type of
    layer (transformers 5), or `local` replaces values of the sliding layers."""
    full = model.ropes[0]
    given = config.get("rope_parameters")
    if isinstance(given, Mapping) and "full_attention" in given:
        rules = [dict(given.get(kind) or {}) for kind in ("full_attention", "sliding_attention")]
        return tuple(
            replace(full, base=float(rule.pop("rope_theta", 10000.0)), scaling=rule)
            for rule in rules
        )
    return full, replace(full, **local)


def with_experts(
    model: Architecture, experts: ExpertSizes, has_experts: Callable[[int], bool] | None = None
) -> Architecture:
    """Return the architecture with experts in the layers for whose index has_experts returns True;
    None = in all."""
    layers = enumerate(model.layers)
    return replace(
        model,
        layers=tuple(
            replace(layer, experts=experts) if has_experts is None or has_experts(index) else layer
            for index, layer in layers
        ),
    )


def after_the_first(config: Mapping[str, Any]) -> Callable[[int], bool]:
    """Return which layers have experts: all after the first few, or every n-th of them."""
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
