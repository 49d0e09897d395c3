"""The text model of Gemma 3n (Google 2025, E2B and E4B):

streams        a token has four vectors between layers, of which a layer computes one (see
streams.py) layer inputs   each layer gets a small vector for each token, from a table of its own
and from the token's embedding attention      most layers have a window; the last layers read the
keys and values of an earlier layer feed-forward   in the first layers, most gates are closed: those
below a quantile of a normal distribution Laurel         a product of two small matrices beside
attention (Menghani et al. 2024, "Learned Augmented Residual Layer")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.layers import (
    Activation,
    Attention,
    Build,
    Embedding,
    Head,
    Layer,
    LayerStack,
    Linear,
    Norm,
    QKVLinear,
    Rope,
    Rotation,
)
from pegboard_model_gemma3n.config import TYPES, Shape, rope_of
from pegboard_model_gemma3n.streams import AltUp, Projections
from pegboard_models.norms import PlainNorm
from pegboard_models.rope import scaled_rope


class Gemma3nModel(nn.Module):
    """[T] token ids → [T, vocab] logits, in the stages that core calls: embed, forward, logits.
    What `embed` returns has the embedding of a token and, after it, the vectors of the layers'
    tables. Of a checkpoint with images or sound, only the text model is loaded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        inner = build.at("model")
        text = config.get("text_config")
        if isinstance(text, Mapping):
            config = text
            inner = inner.at("language_model")
        shape = self.shape = Shape(config)
        hidden = shape.hidden_size
        inputs = shape.num_layers * shape.layer_size
        self.embed_tokens = Embedding(inner.at("embed_tokens"), shape.vocab_size, hidden)
        self.layer_tables = Embedding(
            inner.at("embed_tokens_per_layer"), shape.layer_vocab_size, inputs
        )
        self.known = KnownIds(build, shape)
        self.layer_projection = Linear(inner.at("per_layer_model_projection"), hidden, inputs)
        self.layer_norm = Norm(inner.at("per_layer_projection_norm"), shape.layer_size, shape.eps)
        self.ropes = {
            kind: make_rope(inner, shape, config, kind) for kind in TYPES if kind in shape.types
        }
        self.enter = Projections(inner.at("altup_projections"), shape)
        self.layers = LayerStack(
            inner.at("layers"),
            shape.num_layers,
            lambda b, i: DecoderLayer(b, i, shape, self.ropes),
            None,
        )
        self.leave = Projections(inner.at("altup_unembed_projections"), shape)
        self.norm = Norm(inner.at("norm"), hidden, shape.eps)
        tied = self.embed_tokens if shape.is_tied else None
        self.lm_head = Head(build.at("lm_head"), shape.vocab_size, hidden, tied=tied)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] → [T, hidden_size + num_layers · layer_size]. Tokens that the tables do not have get
        the vectors of token 0."""
        tables = self.layer_tables(self.known(input_ids)) * self.shape.layer_size**0.5
        return torch.cat((self.embed_tokens(input_ids) * self.shape.hidden_size**0.5, tables), 1)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        shape = self.shape
        embedded, tables = hidden.split((shape.hidden_size, hidden.shape[1] - shape.hidden_size), 1)
        projected = (self.layer_projection(embedded) * shape.hidden_size**-0.5).unflatten(
            1, (shape.num_layers, shape.layer_size)
        )
        inputs = (self.layer_norm(projected).flatten(1) + tables) * 0.5**0.5
        rotations = {kind: rope(positions) for kind, rope in self.ropes.items()}
        streams = torch.cat(self.enter.forward([embedded] * shape.num_streams), 1)
        streams = self.layers(streams, inputs, rotations)
        first, *others = self.leave.forward(list(streams.split(shape.hidden_size, 1)))
        for other in others:
            first = first + other
        out: Tensor = self.norm(first * (1 / shape.num_streams))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        cap = self.shape.logits_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class KnownIds(Layer):
    """Token ids [T] → the same, or 0 for tokens that the tables of the layers do not have."""

    def __init__(self, build: Build, shape: Shape) -> None:
        super().__init__(build)
        self.size = shape.vocab_size
        self.num_known = shape.layer_vocab_size

    def bind(self) -> None:
        ids = torch.arange(self.size, device=self.build.device)
        ids[self.num_known :] = 0
        self.forward = lambda input_ids: ids[input_ids]


def make_rope(build: Build, shape: Shape, config: Mapping[str, Any], kind: str) -> Rope:
    base, scaling = rope_of(config, kind)
    return scaled_rope(
        build, shape.head_dim, max_positions=shape.max_positions, base=base, scaling=scaling
    )


class DecoderLayer(nn.Module):
    """One layer. streams: [T, N·H]. inputs: [T, layers · layer_size]."""

    def __init__(self, build: Build, index: int, shape: Shape, ropes: Mapping[str, Rope]) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.kind = shape.types[index]

        def norm(name: str) -> Norm:
            return Norm(build.at(name), hidden, shape.eps)

        self.altup = AltUp(build.at("altup"), shape)
        self.input_layernorm = norm("input_layernorm")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.self_attn = SelfAttention(build.at("self_attn"), index, shape, ropes[self.kind])
        laurel = build.at("laurel")
        self.laurel_left = Linear(laurel.at("linear_left"), hidden, shape.laurel_rank)
        self.laurel_right = Linear(laurel.at("linear_right"), shape.laurel_rank, hidden)
        self.laurel_norm = Norm(laurel.at("post_laurel_norm"), hidden, shape.eps)
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.mlp = FeedForward(build.at("mlp"), shape, shape.widths[index], shape.cutoffs[index])
        self.inputs = slice(index * shape.layer_size, (index + 1) * shape.layer_size)
        self.input_gate = Linear(build.at("per_layer_input_gate"), hidden, shape.layer_size)
        self.input_activation = Activation(build, shape.activation)
        self.input_projection = Linear(build.at("per_layer_projection"), shape.layer_size, hidden)
        self.post_input_norm = norm("post_per_layer_input_norm")
        self.add = build.kernels["add_to_streams"]

    def forward(
        self, streams: Tensor, residual: None, inputs: Tensor, rotations: Mapping[str, Rotation]
    ) -> tuple[Tensor, None]:
        predicted = self.altup.predict(streams)
        active = self.altup.active(predicted)
        normalized = self.input_layernorm(active)
        laurel = normalized + self.laurel_norm(self.laurel_right(self.laurel_left(normalized)))
        attended = self.post_attention_layernorm(
            self.self_attn.forward(normalized, rotations[self.kind])
        )
        hidden = (active + attended + laurel) * 0.5**0.5
        mixed = self.mlp.forward(self.pre_feedforward_layernorm(hidden))
        corrected = self.altup.correct(predicted, hidden + self.post_feedforward_layernorm(mixed))
        gate = self.input_gate(self.altup.scaled(corrected))
        per_layer = self.input_activation(torch.cat((gate, inputs[:, self.inputs]), 1))
        addition = self.post_input_norm(self.input_projection(per_layer))
        return self.add(corrected, addition), None


class SelfAttention(nn.Module):
    """Grouped-query attention. Queries, keys and values are normalized, and scores are not scaled.
    A layer that reads the keys and values of another one has only queries."""

    def __init__(self, build: Build, index: int, shape: Shape, rope: Rope) -> None:
        super().__init__()
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        hidden = shape.hidden_size
        source = shape.sources[index]
        inner = shape.num_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.is_owner = source is None
        if self.is_owner:
            self.qkv_proj = QKVLinear(build, hidden, *heads, bias=shape.bias)
            self.k_norm = Norm(build.at("k_norm"), shape.head_dim, shape.eps)
            self.v_norm = PlainNorm(build, shape.head_dim, shape.eps)
        else:
            self.q_proj = Linear(
                build.at("q_proj"), hidden, inner, bias=shape.bias, split="rows", heads=heads
            )
        self.q_norm = Norm(build.at("q_norm"), shape.head_dim, shape.eps)
        window = shape.window if shape.types[index] == "sliding_attention" else None
        self.attention = Attention(
            build, index, *heads, scale=1.0, window=window, rope=rope, shares_kv_with=source
        )
        self.o_proj = Linear(
            build.at("o_proj"), inner, hidden, bias=shape.bias, split="columns", heads=heads
        )

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        if self.is_owner:
            q, k, v = self.qkv_proj(hidden)
            out = self.attention(self.q_norm(q), self.k_norm(k), self.v_norm(v), rotation)
        else:
            q = self.q_proj(hidden).view(hidden.shape[0], -1, self.head_dim)
            out = self.attention(self.q_norm(q), None, None, rotation)
        return self.o_proj(out)


def cut_gates_of(build: Build, width: int) -> Callable[[Tensor, float], Tensor]:
    """Return `streams.cut_gates` of the channels of this rank. The ranks add up the mean and the
    deviation of all gates. width: gates of all ranks."""
    if build.tensor.size == 1:
        whole: Callable[[Tensor, float], Tensor] = build.kernels["cut_gates"]
        return whole
    add_up = build.tensor.summed(lambda sums: sums)

    def cut(both: Tensor, cutoff: float) -> Tensor:
        gate, up = both.chunk(2, 1)
        wide = gate.float()
        mean = add_up(wide.sum(1, keepdim=True)) / width
        variance = add_up((wide - mean).square().sum(1, keepdim=True)) / width
        cut = (wide - (mean + variance.sqrt() * cutoff)).relu()
        return torch.cat((cut.to(both.dtype), up), 1)

    return cut


class FeedForward(nn.Module):
    """down(gelu(gate(x)) · up(x)). cutoff: a gate counts only as far as it is this many standard
    deviations above the mean of the token's gates; None = as it is."""

    def __init__(self, build: Build, shape: Shape, width: int, cutoff: float | None) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.cut = cut_gates_of(build, width)
        parts = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = Linear(build, shape.hidden_size, 2 * width, parts=parts, split="rows")
        self.activation = Activation(build, shape.activation)
        self.down_proj = Linear(build.at("down_proj"), width, shape.hidden_size, split="columns")

    def forward(self, hidden: Tensor) -> Tensor:
        both = self.gate_up_proj(hidden)
        if self.cutoff is not None:
            both = self.cut(both, self.cutoff)
        return self.down_proj(self.activation(both))
