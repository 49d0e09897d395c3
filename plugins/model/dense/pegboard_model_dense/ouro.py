"""Ouro (Zhu et al. 2025): the layers run several times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.errors import ModelError
from pegboard.layers import read
from pegboard_model_dense.architecture import Architecture, Names
from pegboard_model_dense.config import common, refuse, windows_by_type
from pegboard_model_dense.decoder import Decoder

MAX_PASSES = 64
"""Each pass needs as much of the KV cache as a model of its own, so a config with more is a
mistake."""


class Ouro(Decoder):
    """The layers run several times. The gate with which a token could leave early is not used, as
    in the published configs."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"early_exit_step": None, "early_exit_threshold": 1.0})
        names = Names(after_attention="input_layernorm_2", after_mlp="post_attention_layernorm_2")
        passes = read(config, "total_ut_steps", int)
        if passes is not None and not 1 <= passes <= MAX_PASSES:
            raise ModelError(
                f"the checkpoint's config has total_ut_steps={passes}; expected 1 to {MAX_PASSES}"
            )
        model = common(config, names=names, passes=4 if passes is None else passes)
        window = (
            read(config, "sliding_window", int)
            if read(config, "use_sliding_window", bool)
            else None
        )
        return replace(model, layers=windows_by_type(config, model, window))
