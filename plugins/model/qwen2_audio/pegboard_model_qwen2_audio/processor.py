"""Makes of audio what Qwen2-Audio computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_media.audio import resample
from pegboard_model_qwen2_audio.defaults import AUDIO, AUDIO_TOKEN
from pegboard_models.log_mel import LogMel
from pegboard_models.processing import refuse_options, token_of
from pegboard_models.whisper_sizes import WhisperSizes

SEEN = 2
"""Frames after the last one that sounds which the convolutions see."""


class Qwen2AudioProcessor:
    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        self.token = token_of(config, "audio", AUDIO_TOKEN)
        sizes = WhisperSizes.of(config.get("audio_config") or {}, AUDIO)
        self.mel = LogMel.of(setup.checkpoint, sizes)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("<|audio_bos|><|AUDIO|><|audio_eos|>", (self.token,))

    def process(
        self, modality: str, value: tuple[np.ndarray, int], options: Mapping[str, Any]
    ) -> Processed:
        """The arrays are input_features, float32 [mel bins, frames], and num_frames, int64 [1], of
        those that sound. Raises RequestError for audio that is too short for a row."""
        refuse_options(options)
        samples = resample(*value, self.mel.rate)[: self.mel.num_samples]
        count = self.mel.num_frames(samples)
        num_rows = (count + 1) // 4
        if not num_rows:
            raise RequestError(
                f"the audio has {count} frames of {self.mel.hop / self.mel.rate:g} seconds; the "
                "model takes at least 3. Send a longer one"
            )
        features = np.ascontiguousarray(self.mel(samples, self.mel.num_samples)[:, : count + SEEN])
        arrays = {"input_features": features, "num_frames": np.array([count], np.int64)}
        return Processed([self.token] * num_rows, arrays)
