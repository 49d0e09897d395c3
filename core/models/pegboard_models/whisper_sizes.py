"""The sizes of an encoder of Whisper's kind, from a config. This module does not import torch,
because processors read it, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError

NAMES = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
    "num_mel_bins": "num_mel_bins",
    "max_source_positions": "max_source_positions",
}
"""Whisper's names of sizes → the names that other configs have."""


LARGE = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
}
"""The encoder of Whisper large, by Whisper's names. Configs of other models leave these values out,
as in transformers."""


@dataclass(frozen=True)
class WhisperSizes:
    """num_bins: mel bins of a frame. max_positions: the longest item, in features."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_bins: int
    max_positions: int
    activation: str = "gelu"

    @classmethod
    def of(
        cls, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> WhisperSizes:
        """Read the config of an encoder. defaults: of configs that lack a value, by Whisper's
        names. Raises ModelError."""
        values: dict[str, int] = {}
        for name, other in NAMES.items():
            value = config.get(name, config.get(other, (defaults or {}).get(name)))
            if type(value) is not int or value < 1:
                raise ModelError(
                    f"the checkpoint's audio encoder has {name}={value!r}; expected a whole number "
                    "from 1 on. Correct its config"
                )
            values[name] = value
        sizes = cls(
            hidden_size=values["d_model"],
            num_layers=values["encoder_layers"],
            num_heads=values["encoder_attention_heads"],
            intermediate_size=values["encoder_ffn_dim"],
            num_bins=values["num_mel_bins"],
            max_positions=values["max_source_positions"],
            activation=str(config.get("activation_function") or "gelu"),
        )
        if sizes.hidden_size % sizes.num_heads:
            raise ModelError(
                f"the checkpoint's audio encoder has d_model={sizes.hidden_size}, which is not a "
                f"multiple of encoder_attention_heads={sizes.num_heads}; correct its config"
            )
        return sizes
