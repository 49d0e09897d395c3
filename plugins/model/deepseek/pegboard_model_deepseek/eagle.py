"""An EAGLE head (Li et al. 2024) whose layers are those of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.layers import Build, Embedding, Head, LayerStack, Linear, Norm
from pegboard_model_deepseek.decoder import rope_of
from pegboard_model_deepseek.deepseek import DeepseekV3Layers, has_pairs
from pegboard_model_deepseek.shape import Shape
from pegboard_models.prediction import check_target


class EagleDeepSeek(DeepseekV3Layers, nn.Module):
    """Implements `pegboard.interfaces.draft.DraftModel`. A layer has experts if the checkpoint has
    some for it."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        check_target(build, "EagleDeepSeekMTPModel", "eagle")
        root = build.at("model") if build.has("model.fc") else build
        count = Shape(config).num_layers
        has_experts = [build.has(root.at(f"layers.{i}.mlp.experts").path) for i in range(count)]
        kinds = ["sparse" if has else "dense" for has in has_experts]
        config = {**config, "mlp_layer_types": config.get("mlp_layer_types") or kinds}
        shape = Shape(config)
        hidden = shape.hidden_size
        self.pairs = has_pairs(config)
        self.rope = rope_of(build, config, shape)
        self.embedding_norm = Norm(root.at("enorm"), hidden, shape.eps)
        self.hidden_norm = Norm(root.at("hnorm"), hidden, shape.eps)
        self.fc = Linear(root.at("fc"), 2 * hidden, hidden)
        self.layers = LayerStack(
            root.at("layers"),
            count,
            lambda build, index: self.layer(build, index, shape, config),
            Norm(root.at("norm"), hidden, shape.eps),
        )
        self.embedding: Callable[[Tensor], Tensor] = build.target.embed
        if build.has(root.at("embed_tokens").path):
            self.embedding = Embedding(root.at("embed_tokens"), shape.vocab_size, hidden)
        self.head: Callable[[Tensor], Tensor] = build.target.logits
        if build.has("lm_head"):
            self.head = Head(build.at("lm_head"), shape.vocab_size, hidden)
        build.declared.given = hidden

    def start(self, hidden: Tensor) -> Tensor:
        return hidden

    def embed(self, input_ids: Tensor, *given: Tensor) -> Tensor:
        embedded = self.embedding(input_ids)
        before = self.hidden_norm(given[0].to(embedded.dtype))
        out: Tensor = self.fc(torch.cat([self.embedding_norm(embedded), before], -1))
        return out

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        return self.layers(hidden, self.rope(*positions))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
