"""A decoder of attention and feed-forward blocks, built as its architecture says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Embedding, LayerNorm, LayerStack, Rope
from pegboard_model_dense.architecture import Architecture, Rotary
from pegboard_model_dense.attention import Step
from pegboard_model_dense.blocks import experts_block
from pegboard_model_dense.positions import Places, Positions
from pegboard_models.decoder import scaled
from pegboard_models.rope import scaled_rope

HEAD = "lm_head"
"""What transformers calls the head, whatever checkpoints call it."""


class Layers:
    """Builds the layers of a decoder. ropes: its rotary embeddings."""

    ropes: list[Rope]

    def make_layer(self, build: Build, index: int, model: Architecture) -> nn.Module:
        """Return a layer. A model whose blocks are arranged in its own way overrides this."""
        sizes = model.layers[index]
        feed_forward: nn.Module | None = None
        if sizes.experts is not None:
            feed_forward = experts_block(build, model, sizes.experts)
        elif sizes.width:
            mlp = model.names.mlp
            make = sizes.mlp or model.mlp
            feed_forward = make(build.at(mlp) if mlp else build, model, sizes.width)
        attention = (
            self.make_attention(build.at(model.names.attention), index, model)
            if sizes.num_kv_heads
            else None
        )
        layer: nn.Module = model.block(build, model, attention, feed_forward)
        return layer

    def make_attention(self, build: Build, index: int, model: Architecture) -> nn.Module:
        """Return the attention of a layer, (hidden [T, hidden], step) → [T, hidden]. build: of its
        tensors."""
        attention: nn.Module = model.attention(build, index, model, model.layers[index], self.ropes)
        return attention


class Decoder(Layers, nn.Module):
    """[T] token ids → [T, vocab] logits, in the stages that core calls: embed, forward, logits.
    Subclasses define `architecture`.

    Residual scale r (Granite, MiniCPM): instead of x + r · f(x), the model computes x/r + f(x),
    which needs no product. The embedding is divided by r, and as every block starts with a norm, an
    epsilon divided by r² makes the results the same.
    """

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        model = self.architecture(config)
        names = model.names
        stream = model.residual_scale
        if stream <= 0:
            raise ModelError(
                f"the checkpoint's config scales residuals by {stream}; this architecture needs a "
                "positive number"
            )
        if build.is_divided and (model.passes > 1 or model.skips):
            raise ModelError("the layers of this architecture cannot be divided")
        factor = model.embedding_scale / stream
        self.embedding_scale = factor
        self.embedding = Embedding(build.at(names.embedding), model.vocab_size, model.hidden_size)
        self.embedding_norm = None
        if names.embedding_norm:
            self.embedding_norm = LayerNorm(
                build.at(names.embedding_norm), model.hidden_size, model.eps
            )
        has_positions = names.positions and build.has_first_layer
        self.positions = Positions(build.at(names.positions), model) if has_positions else None
        self.ropes = [make_rope(build, rule, model.max_positions) for rule in model.ropes]
        self.places = Places(build, model.max_positions) if model.alibi else None
        self.layers = LayerStack(
            build.at(names.layers),
            len(model.layers),
            lambda b, i: self.make_layer(b, i, model),
            model.norm(build.at(names.norm), model.hidden_size, model.eps / stream**2),
            unit=stream,
        )
        self.passes = model.passes
        tied = self.embedding if model.is_tied else None
        self.head = model.head(
            build.at(names.head),
            model.vocab_size,
            model.hidden_size,
            tied=tied,
            bias=model.head_bias,
        )
        if names.head != HEAD:  # adapters may use transformers' name
            build.declared.aliases.setdefault(HEAD, build.at(names.head).path)
        self.logits_scale = model.logits_scale
        self.logits_cap = model.logits_cap

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        """Read the checkpoint's config. Raises ModelError for values that the model cannot have."""
        raise NotImplementedError

    def embed(self, input_ids: Tensor) -> Tensor:
        hidden = scaled(self.embedding(input_ids), self.embedding_scale)
        return hidden if self.embedding_norm is None else self.embedding_norm(hidden)

    def forward(self, hidden: Tensor, positions: Tensor, *axes: Tensor) -> Tensor:
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        if self.places is not None:
            step: Step = (self.places(positions),)
        else:
            step = tuple(rope(positions, *axes) for rope in self.ropes)
        for number in range(self.passes):
            hidden = self.layers(hidden, (*step, number))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = scaled(self.head(hidden), self.logits_scale)
        return (
            logits
            if self.logits_cap is None
            else torch.tanh(logits / self.logits_cap) * self.logits_cap
        )


def make_rope(build: Build, rule: Rotary, max_positions: int) -> Rope:
    style = "pairs" if rule.pairs else build.rope_style
    styled = replace(build, rope_style=style)
    return scaled_rope(
        styled, rule.dim, max_positions=max_positions, base=rule.base, scaling=rule.scaling
    )
