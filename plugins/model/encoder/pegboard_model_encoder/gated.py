"""Encoders with rotated positions, most with gates, and with norms after their blocks.

Nomic    nomic-embed-text (Nussbaum et al. 2024), also with experts and then without gates (v2)
Gte      gte-multilingual, gte-en-v1.5 and arctic-embed-m-v2.0 (Zhang et al. 2024)

A checkpoint has the names of the model's first code, or those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Embedding, LayerNorm, Linear, Rope, Rotation, read, size_of
from pegboard.ops.experts import RouterRule
from pegboard_model_encoder.bert import num_labels
from pegboard_model_encoder.experts import ExpertMLP, ExpertSizes, PlainMLP
from pegboard_model_encoder.parts import (
    GatedMLP,
    RotatedAttention,
    TokenTypes,
    check_positions,
    flag_of,
    head_size,
    number_of,
    refuse,
)
from pegboard_models.rope import rope_parameters, scaled_rope, stretched_positions


@dataclass(frozen=True)
class Names:
    """Where the tensors are. qkv, out: of attention. mlp: see `GatedMLP`. gate_is_last: in the
    module that has both."""

    layers: str = "layers"
    norm: str = "embeddings.LayerNorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    gate_is_last: bool = False
    norms: tuple[str, str] = ("post_attention_layernorm", "post_mlp_layernorm")


@dataclass(frozen=True)
class Sizes:
    """What the config says. biases: whether each of these has one: queries, keys and values, the
    result of attention, the first matrices of the feed-forward block, the last one. rotary_dim:
    channels of a head that are rotated. longest: in tokens. experts: None = no layer has them."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str
    eps: float
    num_types: int
    biases: tuple[bool, bool, bool, bool]
    rotary_dim: int
    longest: int
    is_gated: bool = True
    experts: ExpertSizes | None = None


@dataclass(frozen=True)
class Family:
    """An architecture. roots: what may be before the names of all tensors, besides nothing; weight
    loaders add "model" where layers have nothing. names: of its first code. standard: the config →
    the same with the names of transformers. Raises ModelError for variants that are not supported.
    sizes: what such a config says."""

    roots: tuple[str, ...]
    names: Names
    standard: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    sizes: Callable[[Mapping[str, Any]], Sizes]


class Gated(nn.Module):
    """[T] token ids → [T, hidden], the states after the last layer. It has no head: `logits`
    returns its input."""

    def __init__(self, config: Mapping[str, Any], build: Build, family: Family) -> None:
        super().__init__()
        config = family.standard(config)
        sizes = self.sizes = family.sizes(config)
        root = self.root = next((build.at(r) for r in family.roots if build.has(r)), build)
        names = family.names if root.has(root.at(family.names.layers).path) else Names()
        hidden = sizes.hidden_size
        self.words = Embedding(root.at("embeddings.word_embeddings"), sizes.vocab_size, hidden)
        types = root.at("embeddings.token_type_embeddings")
        self.types = TokenTypes(types, sizes.num_types, hidden)
        self.norm = LayerNorm(root.at(names.norm), hidden, sizes.eps)
        base, scaling = rope_parameters(config)
        check_positions(build, stretched_positions(scaling, sizes.longest))
        self.rope = scaled_rope(
            build, sizes.rotary_dim, max_positions=sizes.longest, base=base, scaling=scaling
        )
        layers = root.at(names.layers)
        self.layers = nn.ModuleList(
            GatedLayer(layers.at(index), index, sizes, names, self.rope)
            for index in range(sizes.num_layers)
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        words: Tensor = self.types(self.words(input_ids))
        return words

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        rotation = self.rope(positions)
        hidden = self.norm(hidden)
        for layer in self.layers:
            hidden = layer.forward(hidden, rotation)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float()


class GatedLayer(nn.Module):
    """norm(x + attention(x)), then norm(x + feed_forward(x))."""

    def __init__(self, build: Build, index: int, sizes: Sizes, names: Names, rope: Rope) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.attention = RotatedAttention(
            build,
            index,
            hidden,
            sizes.num_heads,
            rope,
            qkv=names.qkv,
            out=names.out,
            biases=sizes.biases[:2],
        )
        self.mlp = feed_forward(build, index, sizes, names)
        self.attention_norm, self.last_norm = (
            LayerNorm(build.at(name), hidden, sizes.eps) for name in names.norms
        )

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        hidden, _ = self.attention_norm.add(self.attention.forward(hidden, rotation), hidden)
        result: Tensor = self.last_norm.add(self.mlp.forward(hidden), hidden)[0]
        return result


def feed_forward(
    build: Build, index: int, sizes: Sizes, names: Names
) -> GatedMLP | PlainMLP | ExpertMLP:
    """Return the feed-forward block of layer `index`."""
    given = build, sizes.hidden_size, sizes.intermediate_size, sizes.activation
    if sizes.experts is not None and sizes.experts.are_in(index):
        return ExpertMLP(*given, sizes.experts)
    if not sizes.is_gated:
        return PlainMLP(*given, sizes.biases[2:])
    return GatedMLP(
        *given, names=names.mlp, biases=sizes.biases[2:], gate_is_last=names.gate_is_last
    )


class Classifier(Gated):
    """A head of two layers on the state of the first token: classifier(tanh(dense(x))). The token
    types of pairs are an input, if there are any."""

    def __init__(self, config: Mapping[str, Any], build: Build, family: Family) -> None:
        super().__init__(config, build, family)
        size = self.sizes.hidden_size
        self.first_layer = Linear(
            self.root.without_adapters().at("pooler.dense"), size, size, bias=True
        )
        self.last_layer = Linear(
            build.without_adapters().at("classifier"), size, num_labels(config), bias=True
        )
        if self.sizes.num_types > 1:
            build.declared.inputs.append("token_types")

    def embed(self, input_ids: Tensor, *types: Tensor) -> Tensor:
        words = super().embed(input_ids)
        return words + self.types.change(*types) if types else words

    def logits(self, hidden: Tensor) -> Tensor:
        classes: Tensor = self.last_layer(torch.tanh(self.first_layer(hidden)))
        return classes.float()


def common(config: Mapping[str, Any], activation: str, num_types: int) -> dict[str, Any]:
    """Return the sizes that both read in the same way. activation, num_types: the defaults."""
    types = read(config, "type_vocab_size", int)
    return {
        "vocab_size": size_of(config, "vocab_size"),
        "hidden_size": size_of(config, "hidden_size"),
        "num_layers": size_of(config, "num_hidden_layers"),
        "num_heads": size_of(config, "num_attention_heads"),
        "intermediate_size": size_of(config, "intermediate_size"),
        "activation": read(config, "hidden_act", str) or activation,
        "eps": number_of(config, "layer_norm_eps", 1e-12),
        "num_types": num_types if types is None else types,
        "longest": size_of(config, "max_position_embeddings"),
    }


FUNCTIONS = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid", "gelu": "gelu"}
"""`activation_function` of Nomic's first code → the function. The last one has no gate."""


def nomic_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """See `Family.standard`."""
    refuse(
        config,
        prenorm=False,
        causal=False,
        parallel_block=False,
        use_rms_norm=False,
        rotary_emb_interleaved=False,
        rotary_emb_scale_base=None,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        expert_choice_router=False,
        num_shared_experts=0,
        ffn_div=1,
    )
    names = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
    }
    named = {name: config[theirs] for name, theirs in names.items() if theirs in config}
    function = read(config, "activation_function", str)
    if function is not None:
        if function not in FUNCTIONS:
            raise ModelError(
                f"activation_function is {function!r:.60}; expected one of {', '.join(FUNCTIONS)}"
            )
        named["hidden_act"] = FUNCTIONS[function]
    base = named.get("rope_theta") or config.get("rope_theta") or 1000.0
    return {**config, **named, "rope_theta": base}


def nomic_sizes(config: Mapping[str, Any]) -> Sizes:
    """See `Family.sizes`."""
    sizes = common(config, activation="silu", num_types=2)
    channels = head_size(sizes["hidden_size"], sizes["num_heads"])
    fraction = number_of(config, "rotary_emb_fraction", 1.0)
    rotary_dim = int(channels * fraction)
    if not 0 < rotary_dim <= channels or rotary_dim % 2:
        raise ModelError(
            f"rotary_emb_fraction is {fraction}; expected a part of the {channels} channels of a "
            "head that is even and not 0"
        )
    # beyond it, the angles of a text would depend on its length
    if config.get("rotary_scaling_factor") is not None:
        trained = read(config, "max_trained_positions", int) or 2048
        sizes["longest"] = min(sizes["longest"], trained)
    attention = flag_of(config, "qkv_proj_bias", False)
    first = flag_of(config, "mlp_fc1_bias", False)
    last = flag_of(config, "mlp_fc2_bias", False)
    every = read(config, "moe_every_n_layers", int) or 0
    return Sizes(
        **sizes,
        biases=(attention, attention, first, last),
        rotary_dim=rotary_dim,
        is_gated=read(config, "activation_function", str) != "gelu",
        experts=nomic_experts(config, every) if every else None,
    )


def nomic_experts(config: Mapping[str, Any], every: int) -> ExpertSizes:
    """Return what a config with `moe_every_n_layers` says. Raises ModelError if the experts have
    gates."""
    if read(config, "activation_function", str) != "gelu":
        raise ModelError(
            f"moe_every_n_layers is {every}, and activation_function is "
            f"{config.get('activation_function')!r:.60}; experts are supported with gelu"
        )
    rule = RouterRule(
        size_of(config, "moe_top_k"),
        renormalize=flag_of(config, "moe_normalize_expert_weights", False),
    )
    return ExpertSizes(every, size_of(config, "num_experts"), rule)


def gte_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """See `Family.standard`."""
    refuse(
        config,
        position_embedding_type="rope",
        layer_norm_type="layer_norm",
        pack_qkv=True,
        logn_attention_scale=False,
    )
    # the first code has another default than transformers
    base = 160000.0 if config.get("model_type") == "gte" else 10000.0
    return {"rope_theta": base, **config}


def gte_sizes(config: Mapping[str, Any]) -> Sizes:
    """See `Family.sizes`."""
    sizes = common(config, activation="gelu", num_types=1)
    channels = head_size(sizes["hidden_size"], sizes["num_heads"])
    return Sizes(**sizes, biases=(True, True, False, True), rotary_dim=channels)


NOMIC = Family(
    roots=("nomic_bert", "bert", "model"),
    names=Names(
        layers="encoder.layers",
        norm="emb_ln",
        qkv=("attn.Wqkv",),
        out="attn.out_proj",
        mlp=("mlp.fc12", "mlp.fc11", "mlp.fc2"),
        norms=("norm1", "norm2"),
    ),
    standard=nomic_config,
    sizes=nomic_sizes,
)
GTE = Family(
    roots=("new", "gte", "model"),
    names=Names(
        layers="encoder.layer",
        qkv=("attention.qkv_proj",),
        out="attention.o_proj",
        mlp=("mlp.up_gate_proj", "mlp.down_proj"),
        gate_is_last=True,
        norms=("attn_ln", "mlp_ln"),
    ),
    standard=gte_config,
    sizes=gte_sizes,
)


class Nomic(Gated):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build, NOMIC)


class NomicClasses(Classifier):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build, NOMIC)


class Gte(Gated):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build, GTE)


class GteClasses(Classifier):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build, GTE)
