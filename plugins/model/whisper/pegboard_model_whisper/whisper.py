"""Whisper: an encoder of sound, and a decoder that attends to it (Radford et al. 2022, "Robust
speech recognition via large-scale weak supervision")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pegboard.layers import (
    Attention,
    Build,
    Embedding,
    Head,
    LayerNorm,
    LayerStack,
    Linear,
    read,
    size_of,
)
from pegboard_models.parameters import Parameters
from pegboard_models.vision import activation_of
from pegboard_models.whisper_encoder import EPS, WhisperEncoder
from pegboard_models.whisper_sizes import WhisperSizes


class Whisper(nn.Module):
    """[T] token ids → [T, vocab] logits, about the item that the encoder has read."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        root = build.at("model")
        decoder = root.at("decoder")
        width = size_of(config, "d_model")
        vocab_size = size_of(config, "vocab_size")
        sizes = WhisperSizes.of(config)
        self.encoder = WhisperEncoder(root.at("encoder"), sizes)
        self.embedding = Embedding(decoder.at("embed_tokens"), vocab_size, width)
        places = {"embed_positions.weight": (size_of(config, "max_target_positions"), width)}
        self.positions = Parameters(decoder, places)
        count = size_of(config, "decoder_layers")
        self.layers = LayerStack(
            decoder.at("layers"),
            count,
            lambda place, index: DecoderLayer(place, index, count, config, sizes.max_positions),
            LayerNorm(decoder.at("layer_norm"), width, EPS),
        )
        self.head = Head(build.at("proj_out"), vocab_size, width, tied=self.embedding)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: input_features [mel bins, frames] → [frames // 2, width] of each."""
        return self.encoder.forward([item["input_features"] for item in items])

    def store_encoded(self, rows: Tensor) -> None:
        for layer in self.layers.layers:
            layer.cross.store(rows)

    def embed(self, input_ids: Tensor) -> Tensor:
        rows: Tensor = self.embedding(input_ids)
        return rows

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        table = self.positions["embed_positions.weight"]
        return self.layers(hidden + table[positions])

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits


class DecoderLayer(nn.Module):
    """Attention, attention to the encoder's output, and a feed-forward block, each after a norm.

    index: of the layer; its cross attention has the index `count` + index.
    """

    def __init__(
        self, build: Build, index: int, count: int, config: Mapping[str, Any], encoder_tokens: int
    ) -> None:
        super().__init__()
        width = size_of(config, "d_model")
        heads = size_of(config, "decoder_attention_heads")
        inner = size_of(config, "decoder_ffn_dim")
        self.attention_norm = LayerNorm(build.at("self_attn_layer_norm"), width, EPS)
        self.attention = SelfAttention(build.at("self_attn"), index, width, heads)
        self.cross_norm = LayerNorm(build.at("encoder_attn_layer_norm"), width, EPS)
        place = build.at("encoder_attn")
        self.cross = CrossAttention(place, count + index, width, heads, encoder_tokens)
        self.last_norm = LayerNorm(build.at("final_layer_norm"), width, EPS)
        self.up = Linear(build.at("fc1"), width, inner, bias=True, split="rows")
        self.down = Linear(build.at("fc2"), inner, width, bias=True, split="columns")
        self.activation = activation_of(read(config, "activation_function", str) or "gelu")

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, residual = self.attention_norm.add(hidden, residual)
        hidden, residual = self.cross_norm.add(self.attention.forward(hidden), residual)
        hidden, residual = self.last_norm.add(self.cross.forward(hidden), residual)
        return self.down(self.activation(self.up(hidden))), residual


class SelfAttention(nn.Module):
    """[T, width] → the same. Keys have no bias. encoder_tokens: see `Attention`."""

    def __init__(
        self,
        build: Build,
        index: int,
        width: int,
        num_heads: int,
        encoder_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        heads = (num_heads, num_heads, self.head_dim)

        def projection(name: str, bias: bool) -> Linear:
            place = build.at(name)
            return Linear(place, width, width, bias=bias, split="rows", heads=heads)

        self.query = projection("q_proj", True)
        self.key = projection("k_proj", False)
        self.value = projection("v_proj", True)
        self.attend = Attention(
            build, index, num_heads, num_heads, self.head_dim, encoder_tokens=encoder_tokens
        )
        self.out = Linear(
            build.at("out_proj"), width, width, bias=True, split="columns", heads=heads
        )

    def heads(self, rows: Tensor) -> Tensor:
        """[T, heads · channels] → [T, heads, channels]."""
        return rows.view(rows.shape[0], -1, self.head_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        split = (self.query(hidden), self.key(hidden), self.value(hidden))
        return self.out(self.attend(*map(self.heads, split)))


class CrossAttention(SelfAttention):
    """Attention to the rows that `store` has got."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.attend(self.heads(self.query(hidden)), None, None))

    def store(self, rows: Tensor) -> None:
        """Store the encoder's output [n, width]."""
        keys = self.heads(self.key(rows))
        self.attend(keys, keys, self.heads(self.value(rows)))
