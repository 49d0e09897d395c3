"""The language model of Chameleon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.interfaces.weight_loader import WantedWeight
from pegboard.layers import Build, LayerNorm, Norm, read, size_of
from pegboard.layers.build import PlainTensor
from pegboard_models.blocks import GatedMLP, PostNorm, PreNorm, SelfAttention, heads_of
from pegboard_models.decoder import Decoder, DecoderSizes
from pegboard_models.norms import Heads
from pegboard_models.rope import rope_parameters, scaled_rope

HEAD_EPS = 1e-5


class HeadsNorm(LayerNorm):
    """(x [T, heads, D]) → each head normalized, times a weight of its own, plus a bias of its
    own, [heads, D]."""

    def __init__(self, build: Build, heads: Heads, head_dim: int) -> None:
        super().__init__(build, head_dim, HEAD_EPS)
        self.heads = heads

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        start, stop = self.heads.held
        count = stop - start
        names = [f"{self.build.path}.{name}" for name in ("weight", "bias")]
        self.weight, self.bias = (
            PlainTensor(
                {name: (0, count)}, (count, self.size), self.build, sources={name: ((start, stop),)}
            )
            for name in names
        )
        return [WantedWeight(name, (self.heads.count, self.size)) for name in names]

    def bind(self) -> None:
        weight = self.weight.data
        bias = None if self.bias is None else self.bias.data
        eps = self.eps
        layer_norm = self.build.kernels["layer_norm"]
        ones = torch.ones(self.size, dtype=weight.dtype, device=weight.device)

        def forward(x: Tensor) -> Tensor:
            return layer_norm(x, ones, None, eps) * weight + bias

        self.forward = forward


class ChameleonText(Decoder):
    """Attention and a feed-forward block, each with a norm before it, or after it (`swin_norm`,
    Liu et al. 2022, "Swin Transformer V2")."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        sizes = DecoderSizes(config, eps=1e-5)
        heads = heads_of(config)
        base, scaling = rope_parameters(config)
        most = read(config, "max_position_embeddings", int) or 4096
        rope = scaled_rope(build, heads[2], max_positions=most, base=base, scaling=scaling)
        hidden = sizes.hidden_size
        width = size_of(config, "intermediate_size")
        activation = read(config, "hidden_act", str) or "silu"
        bias = bool(read(config, "attention_bias", bool))
        mlp_bias = bool(read(config, "mlp_bias", bool))
        is_after = bool(read(config, "swin_norm", bool))

        def layer(build: Build, index: int) -> nn.Module:
            attention = SelfAttention(
                build.at("self_attn"), index, hidden, heads, rope=rope, bias=bias, norm=HeadsNorm
            )
            feed_forward = GatedMLP(build.at("mlp"), hidden, width, activation, bias=mlp_bias)
            first = Norm(build.at("input_layernorm"), hidden, sizes.eps)
            last = Norm(build.at("post_attention_layernorm"), hidden, sizes.eps)
            if is_after:
                return PostNorm((attention, first), (feed_forward, last))
            return PreNorm((first, attention), (last, feed_forward))

        super().__init__(build, layer, sizes, rope=rope)
