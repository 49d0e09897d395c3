"""The EAGLE head of the Llama form (Li et al. 2024). It joins the embedding of a token with the
target's hidden states before it, and computes the hidden states at the token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.layers import Build, LayerStack, Linear, Norm, read, size_of
from pegboard_draft_eagle.parts import embedding_of, head_of, root_of
from pegboard_models.blocks import GatedMLP, PreNorm, SelfAttention, heads_of
from pegboard_models.decoder import DecoderSizes
from pegboard_models.prediction import check_target
from pegboard_models.rope import rope_parameters, scaled_rope


class FirstLayer(nn.Module):
    """The layer that is not preceded by a norm."""

    def __init__(self, attention: nn.Module, norm: Norm, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm = norm
        self.mlp = mlp

    def forward(self, hidden: Tensor, residual: None, *step: Any) -> tuple[Tensor, Tensor]:
        attended = self.attention.forward(hidden, *step)
        hidden, total = self.norm.add(attended, hidden)
        return self.mlp.forward(hidden), total


class EagleLlama(nn.Module):
    """Implements `pegboard.interfaces.draft.DraftModel`."""

    token_ids: Tensor | None = None

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        check_target(build, "EagleLlamaForCausalLM", "eagle")
        sizes = DecoderSizes(config)
        hidden = sizes.hidden_size
        heads = heads_of(config)
        base, scaling = rope_parameters(config)
        longest = read(config, "max_position_embeddings", int) or 2048
        rope = scaled_rope(build, heads[2], max_positions=longest, base=base, scaling=scaling)
        bias = bool(read(config, "attention_bias", bool))
        activation = read(config, "hidden_act", str) or "silu"
        root = root_of(build, "fc")
        joined = root.at("fc")
        has_bias = f"{joined.path}.bias" in build.stored
        self.fc = Linear(joined, 2 * hidden, hidden, bias=has_bias)

        def layer(build: Build, index: int) -> nn.Module:
            attention = SelfAttention(
                build.at("self_attn"), index, hidden, heads, rope=rope, bias=bias, output_bias=False
            )
            after = Norm(build.at("post_attention_layernorm"), hidden, sizes.eps)
            mlp = GatedMLP(
                build.at("mlp"), hidden, size_of(config, "intermediate_size"), activation
            )
            if index == 0:
                return FirstLayer(attention, after, mlp)
            before = Norm(build.at("input_layernorm"), hidden, sizes.eps)
            return PreNorm((before, attention), (after, mlp))

        self.layers = LayerStack(root.at("layers"), sizes.num_layers, layer, None)
        self.rope = rope
        self.embedding = embedding_of(root, sizes)
        self.head = head_of(build, sizes.vocab_size, hidden)
        build.declared.given = hidden

    def start(self, hidden: Tensor) -> Tensor:
        return hidden

    def embed(self, input_ids: Tensor, *given: Tensor) -> Tensor:
        embedded = self.embedding(input_ids)
        out: Tensor = self.fc(torch.cat([embedded, given[0].to(embedded.dtype)], -1))
        return out

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        return self.layers(hidden, self.rope(*positions))

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden)
        return out
