"""ModernBERT (Warner et al. 2024): norms before the blocks, gates, and rotated positions. Most
layers attend only to the tokens nearby."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Embedding, LayerNorm, Linear, Rope, Rotation, read, size_of
from pegboard_model_encoder.bert import num_labels
from pegboard_model_encoder.parts import (
    GatedMLP,
    RotatedAttention,
    activation_of,
    flag_of,
    number_of,
)
from pegboard_models.rope import rope_parameters, scaled_rope

GLOBAL = "full_attention"
LOCAL = "sliding_attention"
BASES = {GLOBAL: ("global_rope_theta", 160000.0), LOCAL: ("local_rope_theta", 10000.0)}
"""Where configs have the base of each type of layer, and its default."""


class Sizes:
    """What the config says. types: GLOBAL or LOCAL, of each layer. window: of local layers, in
    tokens; half of it to each side."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.hidden_size = size_of(config, "hidden_size")
        self.num_layers = size_of(config, "num_hidden_layers")
        self.num_heads = size_of(config, "num_attention_heads")
        self.intermediate_size = size_of(config, "intermediate_size")
        self.num_positions = size_of(config, "max_position_embeddings")
        self.activation = read(config, "hidden_activation", str) or "gelu"
        self.eps = number_of(config, "norm_eps", 1e-5)
        self.norm_bias = flag_of(config, "norm_bias", False)
        self.attention_bias = flag_of(config, "attention_bias", False)
        self.mlp_bias = flag_of(config, "mlp_bias", False)
        window = read(config, "local_attention", int)
        self.window = 128 if window is None else window
        self.types = layer_types(config, self.num_layers)

    def norm(self, build: Build) -> LayerNorm:
        return LayerNorm(build, self.hidden_size, self.eps, has_bias=self.norm_bias)


def layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return the type of each layer: as the config lists them, or one global layer among
    `global_attn_every_n_layers`, beginning with the first."""
    types = read(config, "layer_types", list[str])
    if types is None:
        period = read(config, "global_attn_every_n_layers", int)
        period = 3 if period is None else period
        if period < 1:
            raise ModelError(f"global_attn_every_n_layers is {period}; expected at least 1")
        return [LOCAL if index % period else GLOBAL for index in range(num_layers)]
    if len(types) != num_layers or not {*types} <= {GLOBAL, LOCAL}:
        raise ModelError(
            f"layer_types is {types!r:.80}; expected {GLOBAL} or {LOCAL} for each of the "
            f"{num_layers} layers"
        )
    return types


def rope_of(config: Mapping[str, Any], kind: str, build: Build, sizes: Sizes) -> Rope:
    """Return the rotation of the layers of one type."""
    by_type = config.get("rope_parameters")
    values = by_type.get(kind) if isinstance(by_type, Mapping) else config.get("rope_scaling")
    name, default = BASES[kind]
    theta = number_of(config, name, default)
    base, scaling = rope_parameters({"rope_theta": theta, "rope_parameters": values})
    return scaled_rope(
        build,
        sizes.hidden_size // sizes.num_heads,
        max_positions=sizes.num_positions,
        base=base,
        scaling=scaling,
    )


class ModernBert(nn.Module):
    """[T] token ids → [T, hidden], the states after the last norm. It has no head: `logits` returns
    its input."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        sizes = self.sizes = Sizes(config)
        root = build.at("model") if build.has("model") else build
        words = root.at("embeddings.tok_embeddings")
        self.words = Embedding(words, size_of(config, "vocab_size"), sizes.hidden_size)
        self.norm = sizes.norm(root.at("embeddings.norm"))
        ropes = {kind: rope_of(config, kind, build, sizes) for kind in dict.fromkeys(sizes.types)}
        self.ropes = nn.ModuleDict(ropes)
        self.layers = nn.ModuleList(
            ModernBertLayer(root.at(f"layers.{index}"), index, sizes, ropes[kind])
            for index, kind in enumerate(sizes.types)
        )
        self.last_norm = sizes.norm(root.at("final_norm"))

    def embed(self, input_ids: Tensor) -> Tensor:
        words: Tensor = self.words(input_ids)
        return words

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        rotations = {kind: rope(positions) for kind, rope in self.ropes.items()}
        hidden = self.norm(hidden)
        residual = hidden
        for layer, kind in zip(self.layers, self.sizes.types, strict=True):
            hidden, residual = layer.forward(hidden, residual, rotations[kind])
        result: Tensor = self.last_norm.add(hidden, residual)[0]
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float()


class ModernBertLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). The first layer has no norm before
    attention, because the embedding has one. `residual` is the sum so far."""

    def __init__(self, build: Build, index: int, sizes: Sizes, rope: Rope) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.attention_norm = sizes.norm(build.at("attn_norm")) if index else None
        self.attention = RotatedAttention(
            build.at("attn"),
            index,
            hidden,
            sizes.num_heads,
            rope,
            qkv=("Wqkv",),
            out="Wo",
            biases=(sizes.attention_bias, sizes.attention_bias),
            window=sizes.window if sizes.types[index] == LOCAL else None,
        )
        self.mlp_norm = sizes.norm(build.at("mlp_norm"))
        self.mlp = GatedMLP(
            build.at("mlp"),
            hidden,
            sizes.intermediate_size,
            sizes.activation,
            names=("Wi", "Wo"),
            biases=(sizes.mlp_bias, sizes.mlp_bias),
        )

    def forward(
        self, hidden: Tensor, residual: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        if self.attention_norm is not None:
            hidden, residual = self.attention_norm.add(hidden, residual)
        mixed = self.attention.forward(hidden, rotation)
        hidden, residual = self.mlp_norm.add(mixed, residual)
        return self.mlp.forward(hidden), residual


class ModernBertClasses(ModernBert):
    """A head on the pooled state x: classifier(norm(activation(dense(x))))."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        size = self.sizes.hidden_size
        bias = flag_of(config, "classifier_bias", False)
        self.between = activation_of(read(config, "classifier_activation", str) or "gelu")
        self.first_layer = Linear(build.without_adapters().at("head.dense"), size, size, bias=bias)
        self.head_norm = self.sizes.norm(build.at("head.norm"))
        self.last_layer = Linear(
            build.without_adapters().at("classifier"), size, num_labels(config), bias=True
        )

    def logits(self, hidden: Tensor) -> Tensor:
        values = self.head_norm(self.between(self.first_layer(hidden)))
        classes: Tensor = self.last_layer(values)
        return classes.float()
