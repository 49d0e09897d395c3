"""Layers that predict one token more (see `pegboard_models.prediction`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.layers import Build
from pegboard_model_mamba.decoder import rope_of
from pegboard_model_mamba.qwen_next import GatedAttention, layer_of, rotary_dim
from pegboard_models.decoder import DecoderSizes
from pegboard_models.norms import OffsetNorm
from pegboard_models.prediction import PredictorForm, TokenPredictor, check_target

QWEN3_NEXT = PredictorForm(
    layer="layers.0",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
    embedding="",
    head="",
    masks_first=False,
)


class Qwen3NextMTP(TokenPredictor):
    """Its layer has attention. The layers of the target have states, which the engine cannot take
    back after drafts, so it refuses drafts for the target."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        check_target(build, "Qwen3NextMTP")
        root = build.at("mtp")
        rope = rope_of(build, config, rotary_dim(config))
        layer = QWEN3_NEXT.layer_of(root)
        mixer = GatedAttention(layer.at("self_attn"), 0, config, rope)
        super().__init__(
            root,
            layer_of(layer, 0, config, mixer),
            lambda *positions: (rope(*positions),),
            DecoderSizes(config),
            QWEN3_NEXT,
            OffsetNorm,
        )
