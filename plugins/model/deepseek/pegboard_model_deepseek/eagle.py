"""EAGLE heads whose layers have latent attention (see `pegboard_models.eagle`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard.layers import Build, read
from pegboard_model_deepseek.decoder import rope_of
from pegboard_model_deepseek.deepseek import DeepseekLayers, DeepseekV3Layers, has_pairs
from pegboard_model_deepseek.shape import Shape
from pegboard_models.eagle import EagleForm, EagleHead, root_of


class LatentEagle(DeepseekLayers, EagleHead):
    """architecture: its name. A layer has experts if the checkpoint has some for it."""

    form = EagleForm()
    architecture = ""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        root = root_of(build, "fc")
        count = Shape(config).num_layers
        has_experts = [build.has(root.at(f"layers.{i}.mlp.experts").path) for i in range(count)]
        kinds = ["sparse" if has else "dense" for has in has_experts]
        config = {**config, "mlp_layer_types": config.get("mlp_layer_types") or kinds}
        shape = Shape(config)
        self.pairs = has_pairs(config)
        rope = rope_of(build, config, shape)
        super().__init__(
            build,
            lambda build, index: self.layer(build, index, shape, config),
            lambda *positions: (rope(*positions),),
            shape,
            count,
            self.architecture,
            self.form,
        )


class EagleDeepSeek(DeepseekV3Layers, LatentEagle):
    form = EagleForm(embedding_norm="enorm", hidden_norm="hnorm")
    architecture = "EagleDeepSeekMTPModel"


class EagleMistralLarge3(LatentEagle):
    """Experts are chosen without corrections, by softmax. Groups count by their best expert."""

    method = "group_limited_greedy"
    architecture = "EagleMistralLarge3ForCausalLM"

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        refuse_late_queries(config, build)
        super().__init__(config, build)


def refuse_late_queries(config: Mapping[str, Any], build: Build) -> None:
    """Raise ModelError if queries of late tokens have factors, and the engine may have such
    tokens."""
    rule = config.get("llama_4_scaling")
    if not isinstance(rule, Mapping):
        return
    first = read(rule, "original_max_position_embeddings", int) or 1
    last = build.max_positions
    if last is None or last > first:
        raise ModelError(
            f"this head has llama_4_scaling, which changes queries from position {first} on, and "
            f"that is not computed; set max_model_len to at most {first}"
        )
