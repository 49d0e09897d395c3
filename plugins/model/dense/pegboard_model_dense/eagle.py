"""The EAGLE head of MiniCPM (see `pegboard_models.eagle`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from pegboard.layers import Build, read
from pegboard_model_dense.decoder import Layers, make_rope
from pegboard_model_dense.relatives import MiniCPM
from pegboard_models.decoder import scaled
from pegboard_models.eagle import EagleForm, EagleHead


class EagleMiniCPM(Layers, EagleHead):
    """The states that it is given, and those that it returns, have the scale of MiniCPM's logits.
    Both are normalized."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        model = MiniCPM.architecture(config)
        count = len(model.layers)
        if denominator := read(config, "mup_denominator", float):
            scale = model.residual_scale * (count / denominator) ** 0.5
            model = replace(model, residual_scale=scale)
        ropes = [make_rope(build, rule, model.max_positions) for rule in model.ropes]
        self.ropes = ropes

        def step(*positions: Tensor) -> tuple[tuple[Any, ...]]:
            return ((*(rope(*positions) for rope in ropes), 0),)

        form = EagleForm(
            layers="eagle_layers",
            norm="",
            embedding_norm="input_norm1",
            hidden_norm="input_norm2",
            unit=model.residual_scale,
        )
        super().__init__(
            build,
            lambda build, index: self.make_layer(build, index, model),
            step,
            model,
            count,
            "EagleMiniCPMForCausalLM",
            form,
        )
        target = build.target
        is_shared = self.embedding == target.embed
        # what the target's embedding is multiplied by already
        scale = getattr(target, "embedding_scale", 1.0) if is_shared else 1.0
        self.embedding_scale = model.embedding_scale / scale
        self.states_scale = model.logits_scale
        self.head_scale = 1 / model.logits_scale if self.head == target.logits else 1.0

    def start(self, hidden: Tensor) -> Tensor:
        return scaled(hidden, self.states_scale)

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        return scaled(super().forward(hidden, *positions), self.states_scale)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(scaled(hidden, self.head_scale))
