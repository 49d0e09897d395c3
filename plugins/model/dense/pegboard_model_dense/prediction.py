"""Layers that predict one token more, of models of this package (see
`pegboard_models.prediction`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from pegboard.layers import Build
from pegboard_model_dense.architecture import Architecture, LayerSizes
from pegboard_model_dense.decoder import Decoder, Layers, make_rope
from pegboard_model_dense.ernie import ErnieMoe
from pegboard_model_dense.glm import Glm4Moe
from pegboard_model_dense.relatives import Biased
from pegboard_models.prediction import (
    PredictorForm,
    TokenPredictor,
    check_target,
    count_layers,
    predictor_path,
)


class DensePredictor(Layers, TokenPredictor):
    """architecture: its name. family: the target's class."""

    form = PredictorForm()
    architecture = ""
    family: type[Decoder]

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        check_target(build, self.architecture)
        root = build.at(self.path(config))
        count = count_layers(config)
        model = self.family.architecture({**config, "num_hidden_layers": count + 1})
        model = replace(model, layers=(self.sizes(model),))
        ropes = [make_rope(build, rule, model.max_positions) for rule in model.ropes]
        self.ropes = ropes

        def step(*positions: Tensor) -> tuple[tuple[Any, ...]]:
            return ((*(rope(*positions) for rope in ropes), 0),)

        layer = self.make_layer(self.form.layer_of(root), 0, model)
        super().__init__(root, layer, step, model, self.form, model.norm)

    def path(self, config: Mapping[str, Any]) -> str:
        """Return the path of the parts."""
        return predictor_path(config)

    def sizes(self, model: Architecture) -> LayerSizes:
        """Return the sizes of the layer. model: the target's architecture, with one layer more."""
        return model.layers[-1]


class MiMoMTP(DensePredictor):
    form = PredictorForm(
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        norm="final_layernorm",
        hidden_first=True,
    )
    architecture = "MiMoMTPModel"
    family = Biased

    def path(self, config: Mapping[str, Any]) -> str:
        return "model.mtp_layers.0"


class Glm4MoeMTP(DensePredictor):
    form = PredictorForm(gives_normed=False)
    architecture = "Glm4MoeMTPModel"
    family = Glm4Moe


class ErnieMTP(DensePredictor):
    """Its layer has no experts."""

    form = PredictorForm(
        layer="mtp_block.0",
        embedding_norm="mtp_emb_norm.0",
        hidden_norm="mtp_hidden_norm.0",
        projection="mtp_linear_proj.0",
        norm="",
        embedding="",
        head="",
    )
    architecture = "ErnieMTPModel"
    family = ErnieMoe

    def path(self, config: Mapping[str, Any]) -> str:
        return "model"

    def sizes(self, model: Architecture) -> LayerSizes:
        return replace(model.layers[-1], experts=None)
