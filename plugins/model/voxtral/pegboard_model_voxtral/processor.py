"""Makes of audio what Voxtral computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_media.audio import resample
from pegboard_model_voxtral.defaults import AUDIO_TOKEN
from pegboard_models.log_mel import LogMel
from pegboard_models.processing import refuse_options, token_of
from pegboard_models.whisper_sizes import LARGE, WhisperSizes


class VoxtralProcessor:
    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        self.token = token_of(config, "audio", AUDIO_TOKEN)
        sizes = WhisperSizes.of(config.get("audio_config") or {}, LARGE)
        self.mel = LogMel.of(setup.checkpoint, sizes)
        self.rows_per_part = sizes.max_positions * sizes.hidden_size // sizes.intermediate_size

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("[BEGIN_AUDIO][AUDIO]", (self.token,))

    def process(
        self, modality: str, value: tuple[np.ndarray, int], options: Mapping[str, Any]
    ) -> Processed:
        """The array is input_features, float32 [parts, mel bins, frames]."""
        refuse_options(options)
        samples = resample(*value, self.mel.rate)
        num_parts = -(-len(samples) // self.mel.num_samples)
        features = self.mel(samples, num_parts * self.mel.num_samples)
        parts = np.stack(np.split(features, num_parts, axis=1))
        return Processed([self.token] * (num_parts * self.rows_per_part), {"input_features": parts})
