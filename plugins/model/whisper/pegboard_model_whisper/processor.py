"""Makes of audio what Whisper computes with."""

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
from pegboard_model_whisper.transcriber import WhisperTranscriber
from pegboard_models.log_mel import LogMel


class WhisperProcessor(WhisperTranscriber):
    """An item is not in the prompt, and always takes 30 seconds."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(setup.checkpoint.config, setup.tokenizer)
        self.features = LogMel.of(setup.checkpoint)
        self.rate = self.features.rate
        self.seconds = self.features.seconds

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("", ())

    def process(
        self, modality: str, value: tuple[np.ndarray, int], options: Mapping[str, Any]
    ) -> Processed:
        """The array is input_features, float32 [mel bins, frames]."""
        samples, rate = value
        if options:
            raise RequestError(
                f"mm_processor_kwargs has {', '.join(options)}; Whisper takes none",
                parameter="mm_processor_kwargs",
            )
        features = self.features
        samples = resample(samples, rate, features.rate)
        if len(samples) > features.num_samples:
            raise RequestError(
                f"the audio has {len(samples) / features.rate:.1f} s, and Whisper hears "
                f"{features.seconds} s at a time; cut it, as /v1/audio/transcriptions does"
            )
        mel = features(samples, features.num_samples)
        return Processed([0] * (mel.shape[1] // 2), {"input_features": mel})
