"""The Q-Former of BLIP-2 (Li et al. 2023): learned queries that read features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import Build, LayerNorm, Linear
from pegboard_models.config_numbers import numbers
from pegboard_models.vision import activation_of

QFORMER = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "cross_attention_frequency": 2,
    "encoder_hidden_size": 1408,
}
"""The numbers that a config has if it says nothing, as in transformers."""


class QFormer(nn.Module):
    """(queries [n, hidden], features [windows, positions, width]) → [windows · n, hidden]. what:
    the name of the config, for errors. Raises ModelError."""

    def __init__(self, build: Build, config: Mapping[str, Any], what: str) -> None:
        super().__init__()
        sizes = numbers(config, QFORMER, what)
        if sizes["hidden_size"] % sizes["num_attention_heads"]:
            raise ModelError(
                f"the checkpoint's {what} has hidden_size={sizes['hidden_size']}; expected a "
                f"multiple of num_attention_heads={sizes['num_attention_heads']}. Correct it"
            )
        self.hidden_size = sizes["hidden_size"]
        eps = float(config.get("layer_norm_eps") or 1e-12)
        activation = str(config.get("hidden_act") or "gelu")
        self.norm = LayerNorm(build.at("layernorm"), self.hidden_size, eps)
        layers = build.at("encoder").at("layer")
        self.layers = nn.ModuleList(
            QFormerLayer(
                layers.at(index),
                sizes,
                eps,
                activation,
                reads=index % sizes["cross_attention_frequency"] == 0,
            )
            for index in range(sizes["num_hidden_layers"])
        )

    def forward(self, queries: Tensor, features: Tensor) -> Tensor:
        count = len(features)
        rows = features.flatten(0, 1)
        hidden = self.norm(queries).repeat(count, 1)
        for layer in self.layers:
            hidden = layer.forward(hidden, rows, count)
        return hidden


class QFormerLayer(nn.Module):
    """Attention among the queries, attention to the features if `reads`, and a feed-forward
    layer. The norms come after."""

    def __init__(
        self, build: Build, sizes: Mapping[str, int], eps: float, activation: str, *, reads: bool
    ) -> None:
        super().__init__()
        hidden = sizes["hidden_size"]
        width = sizes["intermediate_size"]
        heads = sizes["num_attention_heads"]
        self.attention = QFormerAttention(build.at("attention"), hidden, hidden, heads, eps)
        features = sizes["encoder_hidden_size"]
        self.reading = (
            QFormerAttention(build.at("crossattention"), hidden, features, heads, eps)
            if reads
            else None
        )
        self.up = Linear(build.at("intermediate_query").at("dense"), hidden, width, bias=True)
        self.down = Linear(build.at("output_query").at("dense"), width, hidden, bias=True)
        self.norm = LayerNorm(build.at("output_query").at("LayerNorm"), hidden, eps)
        self.activation = activation_of(activation)

    def forward(self, hidden: Tensor, features: Tensor, count: int) -> Tensor:
        """[count · n, hidden] → the same. count: windows."""
        hidden = self.attention.forward(hidden, hidden, count)
        if self.reading is not None:
            hidden = self.reading.forward(hidden, features, count)
        return self.norm(hidden + self.down(self.activation(self.up(hidden))))


class QFormerAttention(nn.Module):
    """norm(x + attention(x, features))."""

    def __init__(self, build: Build, hidden: int, width: int, heads: int, eps: float) -> None:
        super().__init__()
        inner = build.at("attention")
        self.num_heads = heads
        self.query = Linear(inner.at("query"), hidden, hidden, bias=True)
        self.key = Linear(inner.at("key"), width, hidden, bias=True)
        self.value = Linear(inner.at("value"), width, hidden, bias=True)
        self.out = Linear(build.at("output").at("dense"), hidden, hidden, bias=True)
        self.norm = LayerNorm(build.at("output").at("LayerNorm"), hidden, eps)

    def forward(self, hidden: Tensor, features: Tensor, count: int) -> Tensor:
        split = [
            part.unflatten(0, (count, -1)).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query(hidden), self.key(features), self.value(features))
        ]
        mixed = functional.scaled_dot_product_attention(*split).transpose(1, 2)
        return self.norm(hidden + self.out(mixed.reshape(hidden.shape)))
