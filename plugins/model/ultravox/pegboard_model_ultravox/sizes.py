"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.model import ModelPart
from pegboard_models.config_numbers import numbers
from pegboard_models.whisper_sizes import WhisperSizes

TEXT = "language_model."
AUDIO = "audio_tower."
"""What the names of the parts' tensors begin with."""
AUDIO_TOKEN = 32000
STACK = 8
ENCODER = {
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
}
"""The encoder of a config without these values, as in transformers' WhisperConfig."""


def encoder_sizes(config: Mapping[str, Any]) -> WhisperSizes:
    """Return the sizes of the encoder. Raises ModelError if it is not Whisper's."""
    audio = config.get("audio_config") or {}
    kind = audio.get("model_type", "whisper") if isinstance(audio, Mapping) else audio
    if kind != "whisper":
        raise ModelError(
            f"the checkpoint's audio_config has model_type={kind!r}; expected 'whisper'. Use a "
            "version of Ultravox with Whisper's encoder"
        )
    block = config.get("audio_latency_block_size")
    if block is not None:
        raise ModelError(
            f"the checkpoint's config has audio_latency_block_size={block!r}; the encoder attends "
            "to all of a chunk. Use a version of Ultravox without this value"
        )
    return WhisperSizes.of(audio, ENCODER)


def parts(config: Mapping[str, Any]) -> dict[str, ModelPart]:
    """Return the checkpoints of the language model and of the encoder, if a config names them."""
    places = {"text_model_id": ("text_config", TEXT), "audio_model_id": ("audio_config", AUDIO)}
    return {
        key: ModelPart(str(config[name]), prefix)
        for name, (key, prefix) in places.items()
        if config.get(name) is not None
    }


@dataclass(frozen=True)
class Stacking:
    """frames: of mel bins in a chunk. stack: features of a row. A feature is of two frames."""

    frames: int
    stack: int

    @classmethod
    def of(cls, config: Mapping[str, Any], sizes: WhisperSizes) -> Stacking:
        """Read the config. Raises ModelError."""
        stack = numbers(config, {"stack_factor": STACK}, "config")["stack_factor"]
        return cls(2 * sizes.max_positions, stack)

    def num_rows(self, frames: int) -> int:
        """Return the rows of audio with this many frames."""
        whole, rest = divmod(frames, self.frames)
        return whole * self.rows_of_chunk(self.frames) + self.rows_of_chunk(rest)

    def rows_of_chunk(self, frames: int) -> int:
        """Return the rows of a chunk, whose last one may be of fewer features."""
        return -(-frames // (2 * self.stack))
