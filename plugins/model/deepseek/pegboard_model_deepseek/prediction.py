"""Layers that predict one token more, of models with latent attention (see
`pegboard_models.prediction`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pegboard.layers import Build, read
from pegboard_model_deepseek import longcat, pangu
from pegboard_model_deepseek.decoder import LatentLayers, mlp, rope_of
from pegboard_model_deepseek.deepseek import DeepseekV3Layers, has_pairs
from pegboard_model_deepseek.pangu import PanguLayers
from pegboard_model_deepseek.shape import Shape, sparse_layers
from pegboard_models.prediction import (
    PredictorForm,
    TokenPredictor,
    check_target,
    predictor_path,
)


class LatentPredictor(LatentLayers, TokenPredictor):
    """form: of the family. architecture: its name."""

    form = PredictorForm()
    architecture = ""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        check_target(build, self.architecture)
        root = build.at(self.path(config))
        config = self.of_one_layer(config)
        shape = Shape(config)
        self.pairs = has_pairs(config)
        rope = rope_of(build, config, shape)
        layer = self.layer(self.form.layer_of(root), 0, shape, config)
        super().__init__(root, layer, lambda *positions: (rope(*positions),), shape, self.form)

    def path(self, config: Mapping[str, Any]) -> str:
        """Return the path of the parts."""
        return predictor_path(config)

    def of_one_layer(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config of a model that has only this layer."""
        return one_layer(config)


class DeepSeekMTP(DeepseekV3Layers, LatentPredictor):
    architecture = "DeepSeekMTPModel"


class OpenPanguMTP(PanguLayers, LatentPredictor):
    architecture = "OpenPanguMTPModel"

    def of_one_layer(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return one_layer(pangu.standard(config))


class LongCatFlashMTP(LatentPredictor):
    """Its layer is half of one of the target's, without the experts."""

    form = PredictorForm(
        layer="layers.0",
        embedding_norm="layers.0.enorm.m",
        hidden_norm="layers.0.hnorm.m",
        projection="layers.0.eh_proj",
        norm="norm",
        head="",
        masks_first=False,
    )
    architecture = "LongCatFlashMTPModel"

    def path(self, config: Mapping[str, Any]) -> str:
        return "model.mtp"

    def of_one_layer(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**longcat.standard(config), "num_hidden_layers": 1}

    def attention(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        return longcat.scaled_attention(build, index, shape, config)

    def feed_forward(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        return mlp(build.at("transformer_layer.mlp"), shape)


def one_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model that has only the layer after the last one. It has experts if
    the rule of the config says so. If the config lists its layers, it is like the last of them."""
    num_layers = Shape(config).num_layers
    kinds = read(config, "mlp_layer_types", list[str])
    if kinds:
        kind = [*kinds, *kinds[-1:] * num_layers][num_layers]
    else:
        kind = "sparse" if sparse_layers(config, num_layers + 1)[num_layers] else "dense"
    return {**config, "num_hidden_layers": 1, "mlp_layer_types": [kind]}
