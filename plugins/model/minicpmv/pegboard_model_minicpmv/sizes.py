"""What the models and their processors read in a config. It is flat: the sizes of the language
model are at its root. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.config_numbers import numbers, section
from pegboard_models.vision_sizes import VisionSizes
from pegboard_models.whisper_sizes import WhisperSizes

OLDEST = "2.5"
"""This version has other placeholders and other positions."""
LANGUAGES = {OLDEST: "llama", "2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}
"""Version of MiniCPM-V → model_type of its language model."""
OMNI = {"2.6": "qwen2", "4.5": "qwen3"}
"""The same of MiniCPM-o."""
VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 980,
    "patch_size": 14,
}
"""The tower of configs without a vision_config."""
TOWERS: Mapping[str, Mapping[str, Any]] = {
    "siglip": {},
    "siglip_vision_model": {},
    "idefics2": {"patch_size": 32},
    "idefics2_vision": {"patch_size": 32},
}
"""Name of the tower in a vision_config → what differs from SigLIP if it does not say."""
WHISPER = {
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
}
"""The values that an audio_config has if it does not say, as in transformers."""
POOLED = {"2.6": 2, "4.5": 5}
"""Version of MiniCPM-o → the features of a row, if the config does not say."""
POSITIONS = 50
"""Features of a second of audio."""
CHANNELS = 128
"""Of a head of the resampler."""


def version_of(config: Mapping[str, Any], known: Mapping[str, str] = LANGUAGES) -> str:
    """Return the version, "2.6". Oldest configs do not say it. Raises ModelError for others than
    those that are known."""
    version = config.get("version")
    if version is None and known is OMNI:
        return "2.6"
    if version is None:
        is_first = config.get("hidden_size") == 2304 and config.get("query_num") == 64
        version = "2.0" if is_first else OLDEST
    name = f"{version}.0" if type(version) is int else str(version)
    if name not in known:
        raise ModelError(
            f"the checkpoint's config has version={version!r}; supported: {', '.join(known)}. Use "
            "a checkpoint of one of them"
        )
    return name


def switch(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a value that is true or false. Raises ModelError for others."""
    value = config.get(name, default)
    if type(value) is not bool:
        raise ModelError(
            f"the checkpoint's config has {name}={value!r}; expected true or false. Correct it"
        )
    return value


def vision_of(config: Mapping[str, Any]) -> tuple[VisionSizes, int]:
    """Return the sizes of the tower, and how many of its layers are used. Raises ModelError."""
    given = section(config, "vision_config")
    values = dict(VISION if config.get("vision_config") is None else given)
    kind = values.get("model_type", "siglip")
    if not isinstance(kind, str) or kind not in TOWERS:
        raise ModelError(
            f"the checkpoint's vision tower is {kind!r}; supported: {', '.join(TOWERS)}"
        )
    sizes = VisionSizes.of({**TOWERS[kind], **values, "model_type": "siglip_vision_model"})
    return sizes, sizes.num_layers - switch(config, "drop_vision_last_layer", True)


def queries_of(config: Mapping[str, Any]) -> int:
    """Return the rows of a slice. Raises ModelError."""
    return numbers(config, {"query_num": 64}, "config")["query_num"]


def heads_of(width: int) -> int:
    """Return the heads of the resampler. width: of a row. Raises ModelError for a width that they
    do not divide."""
    heads = width // CHANNELS
    if heads < 1 or width % heads or width % 4:
        raise ModelError(
            f"the checkpoint's config has hidden_size={width}; expected a multiple of {CHANNELS}, "
            "because the heads of its resampler have so many channels"
        )
    return heads


@dataclass(frozen=True)
class AudioSizes:
    """encoder: Whisper's. pooled: the features that are averaged to a row. chunk: features attend
    to all before the end of their chunk of so many features; None = to all."""

    encoder: WhisperSizes
    pooled: int
    chunk: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AudioSizes:
        """Read the config of MiniCPM-o. Raises ModelError."""
        encoder = WhisperSizes.of(section(config, "audio_config"), WHISPER)
        if encoder.intermediate_size // 4 != encoder.hidden_size:
            raise ModelError(
                f"the checkpoint's audio encoder has encoder_ffn_dim={encoder.intermediate_size} "
                f"and d_model={encoder.hidden_size}; expected 4 times as many, because the "
                "projection takes a quarter of the former. Correct its config"
            )
        default = {"audio_pool_step": POOLED[version_of(config, OMNI)]}
        pooled = numbers(config, default, "config")["audio_pool_step"]
        seconds = config.get("audio_chunk_length", 1.0)
        is_number = type(seconds) in (int, float) and math.isfinite(seconds)
        if not is_number or 0 < seconds < 1 / POSITIONS:
            raise ModelError(
                f"the checkpoint's config has audio_chunk_length={seconds!r}; expected seconds, at "
                f"least {1 / POSITIONS}, or 0 for no chunks. Correct it"
            )
        return cls(encoder, pooled, int(seconds * POSITIONS) if seconds > 0 else None)

    def num_rows(self, num_frames: int) -> int:
        """Return the rows of so many mel frames."""
        return ((num_frames + 1) // 2) // self.pooled

    @property
    def rows_of_second(self) -> int:
        """Between two marks, there are as many rows."""
        return POSITIONS // self.pooled
