"""Encoders with learned positions, and norms after their blocks.

- Bert: two kinds of token types (Devlin et al. 2019)
- Roberta and XLM-Roberta: positions begin after the id of padding (Liu et al. 2019; Conneau et al.
  2020)
- DistilBert: other names, no token types (Sanh et al. 2019)
- MPNet: positions as in Roberta, no token types, and attention has a bias by distance (Song et al.
  2020)

The tokens of the second of two texts have token type 1, an input that the model declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import (
    Attention,
    Build,
    Embedding,
    Layer,
    LayerNorm,
    Linear,
    QKVLinear,
    read,
    size_of,
)
from pegboard.layers.build import PlainTensor
from pegboard_model_encoder.distance import NUM_BUCKETS, DistanceBias
from pegboard_model_encoder.parts import activation_of, check_positions, head_size


@dataclass(frozen=True)
class Sizes:
    """What the config says. first_position: the row of the table that position 0 has. num_types: 0
    = no token types. has_distances: attention has a bias by distance, which all layers share."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_positions: int
    activation: str
    eps: float = 1e-12
    first_position: int = 0
    num_types: int = 0
    has_distances: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        if read(config, "position_embedding_type", str) not in (None, "absolute"):
            raise ModelError(
                f"position_embedding_type is {config['position_embedding_type']!r}; only absolute "
                "is supported"
            )
        eps = read(config, "layer_norm_eps", float)
        types = read(config, "type_vocab_size", int)
        return cls(
            vocab_size=size_of(config, "vocab_size"),
            hidden_size=size_of(config, "hidden_size"),
            num_layers=size_of(config, "num_hidden_layers"),
            num_heads=size_of(config, "num_attention_heads"),
            intermediate_size=size_of(config, "intermediate_size"),
            num_positions=size_of(config, "max_position_embeddings"),
            activation=read(config, "hidden_act", str) or "gelu",
            eps=1e-12 if eps is None else eps,
            num_types=2 if types is None else types,
        )


@dataclass(frozen=True)
class Names:
    """Where the tensors of an architecture are. root: before all of them in the checkpoint of a
    model with a head; that of a model without one has nothing there. qkv, out, norm: of attention.
    up, down, last_norm: of the feed-forward block. distances: of the bias by distance."""

    root: str = "bert"
    layers: str = "encoder.layer"
    qkv: tuple[str, str, str] = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    )
    out: str = "attention.output.dense"
    norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    last_norm: str = "output.LayerNorm"
    distances: str = "encoder.relative_attention_bias"


class Bert(nn.Module):
    """[T] token ids → [T, hidden], the states after the last layer. It has no head: `logits`
    returns its input."""

    names = Names()
    has_root = False

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        sizes = self.sizes(config)
        check_positions(build, sizes.num_positions - sizes.first_position)
        has_root = self.has_root or build.has(self.names.root)
        root = build.at(self.names.root) if has_root else build
        tables = root.at("embeddings")
        self.words = Embedding(tables.at("word_embeddings"), sizes.vocab_size, sizes.hidden_size)
        self.places = Places(tables, sizes)
        self.norm = LayerNorm(tables.at("LayerNorm"), sizes.hidden_size, sizes.eps)
        distances = root.at(self.names.distances)
        self.distances = DistanceBias(distances, sizes.num_heads) if sizes.has_distances else None
        bias = None if self.distances is None else self.distances.bias.data
        layers = root.at(self.names.layers)
        self.layers = nn.ModuleList(
            BertLayer(layers.at(i), i, sizes, self.names, bias) for i in range(sizes.num_layers)
        )

    @staticmethod
    def sizes(config: Mapping[str, Any]) -> Sizes:
        return Sizes.of(config)

    def embed(self, input_ids: Tensor) -> Tensor:
        words: Tensor = self.words(input_ids)
        return words

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        hidden = self.norm(hidden + self.places(positions))
        for layer in self.layers:
            hidden = layer.forward(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float()


class Places(Layer):
    """(positions [T]) → [T, hidden], the vector of each position plus that of token type 0. They
    are added when weights are loaded."""

    def __init__(self, build: Build, sizes: Sizes) -> None:
        super().__init__(build)
        self.shape = (sizes.num_positions, sizes.hidden_size)
        self.types_shape = (sizes.num_types, sizes.hidden_size)
        self.first = sizes.first_position

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        names = (
            f"{self.build.path}.position_embeddings.weight",
            f"{self.build.path}.token_type_embeddings.weight",
        )
        shapes = (self.shape, self.types_shape)
        self.table, self.types = (
            PlainTensor({name: (0, shape[0])}, shape, self.build)
            for name, shape in zip(names, shapes, strict=True)
        )
        return [
            WantedWeight(name, shape) for name, shape in zip(names, shapes, strict=True) if shape[0]
        ]

    def accept(self, piece: WeightPiece) -> None:
        (self.types if piece.name in self.types.names else self.table).accept(piece)

    def finish(self) -> None:
        if len(self.types.data):
            self.table.data += self.types.data[0]

    def bind(self) -> None:
        table = self.table.data[self.first :]
        self.forward = lambda positions: table[positions]

    def change(self, types: Tensor) -> Tensor:
        """Return what the second token type adds to the first: types [T] of 0 or 1 → [T,
        hidden]."""
        return types.unsqueeze(1) * (self.types.data[1] - self.types.data[0])


class BertLayer(nn.Module):
    """norm(x + attention(x)), then norm(x + feed_forward(x))."""

    def __init__(
        self, build: Build, index: int, sizes: Sizes, names: Names, bias: Tensor | None
    ) -> None:
        super().__init__()
        self.activation = activation_of(sizes.activation)
        size = sizes.hidden_size
        heads = sizes.num_heads, sizes.num_heads, head_size(size, sizes.num_heads)
        self.qkv = QKVLinear(build, size, *heads, bias=True, names=names.qkv)
        self.attention = Attention(build, index, *heads, encoder=True, distance_bias=bias)
        self.out = Linear(build.at(names.out), size, size, bias=True, split="columns", heads=heads)
        self.attention_norm = LayerNorm(build.at(names.norm), size, sizes.eps)
        width = sizes.intermediate_size
        self.up = Linear(build.at(names.up), size, width, bias=True, split="rows")
        self.down = Linear(build.at(names.down), width, size, bias=True, split="columns")
        self.last_norm = LayerNorm(build.at(names.last_norm), size, sizes.eps)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.attention(*self.qkv(hidden))
        hidden, _ = self.attention_norm.add(self.out(mixed), hidden)
        result, _ = self.last_norm.add(self.down(self.activation(self.up(hidden))), hidden)
        normalized: Tensor = result
        return normalized


class Roberta(Bert):
    names = Names(root="roberta")

    @staticmethod
    def sizes(config: Mapping[str, Any]) -> Sizes:
        padding = read(config, "pad_token_id", int)
        return replace(Sizes.of(config), first_position=(1 if padding is None else padding) + 1)


class DistilBert(Bert):
    names = Names(
        root="distilbert",
        layers="transformer.layer",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        last_norm="output_layer_norm",
    )

    @staticmethod
    def sizes(config: Mapping[str, Any]) -> Sizes:
        names = {
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        }
        named = {name: config[theirs] for name, theirs in names.items() if theirs in config}
        return Sizes.of({**config, **named, "type_vocab_size": 0, "layer_norm_eps": 1e-12})


class MPNet(Bert):
    names = Names(
        root="mpnet",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        norm="attention.LayerNorm",
    )

    @staticmethod
    def sizes(config: Mapping[str, Any]) -> Sizes:
        buckets = read(config, "relative_attention_num_buckets", int)
        if buckets not in (None, NUM_BUCKETS):
            raise ModelError(
                f"relative_attention_num_buckets is {buckets}; only {NUM_BUCKETS} is supported"
            )
        sizes = Sizes.of({**config, "type_vocab_size": 0})
        return replace(sizes, first_position=2, has_distances=True)


class Headed(Bert):
    """The part of models with classes below their head. It also reads pairs. Their token types are
    an input, if there are any."""

    has_root = True

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if self.sizes(config).num_types > 1:
            build.declared.inputs.append("token_types")

    def embed(self, input_ids: Tensor, *types: Tensor) -> Tensor:
        words = super().embed(input_ids)
        return words + self.places.change(*types) if types else words


class Classifier(Headed):
    """A head of two layers on the state of the first token: last(activation(first(x)))."""

    first_name = "classifier.dense"
    last_name = "classifier.out_proj"
    between: Callable[[Tensor], Tensor] = staticmethod(torch.tanh)

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        size = self.sizes(config).hidden_size
        labels = num_labels(config)
        self.first_layer = Linear(
            build.without_adapters().at(self.first_name), size, size, bias=True
        )
        self.last_layer = Linear(
            build.without_adapters().at(self.last_name), size, labels, bias=True
        )

    def logits(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.last_layer(self.between(self.first_layer(hidden)))
        return values.float()


class BertClasses(Classifier):
    first_name = "bert.pooler.dense"
    last_name = "classifier"


class RobertaClasses(Classifier, Roberta):
    pass


class MPNetClasses(Classifier, MPNet):
    pass


class DistilBertClasses(Classifier, DistilBert):
    first_name = "pre_classifier"
    last_name = "classifier"
    between = staticmethod(functional.relu)


class TokenClassifier(Headed):
    """A head of one layer on the state of each token."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        size = self.sizes(config).hidden_size
        self.head = Linear(
            build.without_adapters().at("classifier"), size, num_labels(config), bias=True
        )

    def logits(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.head(hidden)
        return values.float()


class BertTokens(TokenClassifier):
    pass


class RobertaTokens(TokenClassifier, Roberta):
    pass


class MPNetTokens(TokenClassifier, MPNet):
    pass


class DistilBertTokens(TokenClassifier, DistilBert):
    pass


def num_labels(config: Mapping[str, Any]) -> int:
    """Return the number of classes: that of the config's labels, or 2, as in transformers."""
    labels = config.get("id2label")
    return (
        len(labels)
        if isinstance(labels, Mapping) and labels
        else read(config, "num_labels", int) or 2
    )
