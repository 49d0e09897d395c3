"""The EAGLE head of Llama 4 (see `pegboard_models.eagle`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pegboard.errors import ModelError
from pegboard.layers import Build, read
from pegboard_model_llama.llama4 import Llama4Layers, Llama4Shape
from pegboard_models.decoder import scaled
from pegboard_models.eagle import EagleHead


class EagleLlama4(EagleHead):
    """Its layers have no experts."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = {"num_experts_per_tok": 1, "num_local_experts": 1, **config}
        shape = Llama4Shape(config)
        if shape.with_experts:
            raise ModelError(
                f"this head has experts in layers {[*shape.with_experts]}, and only heads without "
                "experts are computed; its config must have moe_layers=[]"
            )
        parts = Llama4Layers(config, build, shape)
        self.logits_scale = read(config, "logit_scale", float) or 1.0
        super().__init__(
            build, parts.layer, parts.step, shape, shape.num_layers, "EagleLlama4ForCausalLM"
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return scaled(super().logits(hidden), self.logits_scale)
