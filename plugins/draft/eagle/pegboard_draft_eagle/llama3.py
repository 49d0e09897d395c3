"""The EAGLE-3 head of the Llama form (Li et al. 2025). It joins hidden states of three depths of
the target to one, reads it beside the embedding of the next token, and may know fewer tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Linear, Norm, read, size_of
from pegboard_drafts.token_ids import TokenIds
from pegboard_models.blocks import GatedMLP, SelfAttention, heads_of
from pegboard_models.decoder import DecoderSizes
from pegboard_models.eagle import embedding_of, head_of, root_of
from pegboard_models.prediction import check_target
from pegboard_models.rope import rope_parameters, scaled_rope

DEPTHS = 3


class OnlyLayer(nn.Module):
    """The layer of the head: it attends with the embedding and the hidden states side by side."""

    def __init__(self, build: Build, config: Mapping[str, Any], sizes: DecoderSizes) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        heads = heads_of(config)
        base, scaling = rope_parameters(config)
        longest = read(config, "max_position_embeddings", int) or 2048
        self.rope = scaled_rope(build, heads[2], max_positions=longest, base=base, scaling=scaling)
        self.input_norm = Norm(build.at("input_layernorm"), hidden, sizes.eps)
        self.hidden_norm = Norm(build.at("hidden_norm"), hidden, sizes.eps)
        self.attention = SelfAttention(
            build.at("self_attn"),
            0,
            hidden,
            heads,
            rope=self.rope,
            bias=bool(read(config, "attention_bias", bool)),
            output_bias=False,
            width=2 * hidden,
        )
        self.norm = Norm(build.at("post_attention_layernorm"), hidden, sizes.eps)
        activation = read(config, "hidden_act", str) or "silu"
        self.mlp = GatedMLP(
            build.at("mlp"), hidden, size_of(config, "intermediate_size"), activation
        )
        self.adds_normed = bool(read(config, "norm_before_residual", bool))

    def forward(self, embedded: Tensor, given: Tensor, *positions: Tensor) -> Tensor:
        normed = self.hidden_norm(given)
        joined = torch.cat([self.input_norm(embedded), normed], -1)
        attended = self.attention.forward(joined, self.rope(*positions))
        hidden, total = self.norm.add(attended, normed if self.adds_normed else given)
        return self.mlp.forward(hidden) + total


class Eagle3Llama(nn.Module):
    """Implements `pegboard.interfaces.draft.DraftModel`."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        check_target(build, "Eagle3LlamaForCausalLM", "eagle3")
        sizes = DecoderSizes(config)
        hidden = sizes.hidden_size
        if sizes.num_layers != 1:
            raise ModelError(f"an EAGLE-3 head has one layer; this one has {sizes.num_layers}")
        root = root_of(build, "fc")
        states = size_of(config, "target_hidden_size")
        joined = root.at("fc")
        has_bias = f"{joined.path}.bias" in build.stored
        self.fc = Linear(joined, DEPTHS * states, hidden, bias=has_bias)
        layer = root.at("midlayer")
        self.layer = OnlyLayer(
            layer if build.has(layer.path) else root.at("layers.0"), config, sizes
        )
        self.norm = Norm(root.at("norm"), hidden, sizes.eps)
        self.embedding = embedding_of(root, sizes)
        count = read(config, "draft_vocab_size", int) or sizes.vocab_size
        self.head = head_of(build, count, hidden)
        names = [path for path in ("d2t", "model.d2t") if path in build.stored]
        self.ids = None
        if names:
            path = build.at(names[0])
            self.ids = TokenIds(path, count, sizes.vocab_size, is_difference=True)
        build.declared.given = hidden

    @property
    def token_ids(self) -> Tensor | None:
        """The target's id of each token; None = they are the same."""
        return None if self.ids is None else self.ids.ids.data

    def start(self, *hidden: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.cat(hidden, -1))
        return out

    def embed(self, input_ids: Tensor, *given: Tensor) -> Tensor:
        embedded = self.embedding(input_ids)
        return torch.cat([embedded, given[0].to(embedded.dtype)], -1)

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        embedded, given = (part.contiguous() for part in hidden.chunk(2, -1))
        return self.layer.forward(embedded, given, *positions)

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(hidden))
        return out
