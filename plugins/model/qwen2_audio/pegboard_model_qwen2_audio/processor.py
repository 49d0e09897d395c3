"""Makes of audio what Qwen2-Audio and Audio Flamingo 3 compute with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_media.audio import resample
from pegboard_model_qwen2_audio.defaults import (
    AUDIO_TOKEN,
    FLAMINGO_AUDIO_TOKEN,
    MAX_SECONDS,
    SEEN,
)
from pegboard_models.log_mel import LogMel
from pegboard_models.processing import processor_values, refuse_options, token_of
from pegboard_models.whisper_sizes import LARGE, WhisperSizes


class Qwen2AudioProcessor:
    """audio_token: if the config names none. text: stands for an item in a chat."""

    audio_token = AUDIO_TOKEN
    text = "<|audio_bos|><|AUDIO|><|audio_eos|>"

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        self.token = token_of(config, "audio", self.audio_token)
        sizes = WhisperSizes.of(config.get("audio_config") or {}, LARGE)
        self.mel = LogMel.of(setup.checkpoint, sizes)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(self.text, (self.token,))

    def process(
        self, modality: str, value: tuple[np.ndarray, int], options: Mapping[str, Any]
    ) -> Processed:
        """The arrays are input_features, float32 [mel bins, frames], and num_frames, int64 [1], of
        those that sound. Raises RequestError for audio that is too short for a row."""
        refuse_options(options)
        samples = resample(*value, self.mel.rate)[: self.mel.num_samples]
        count = self.mel.num_frames(samples)
        num_rows = self.num_rows(count)
        features = np.ascontiguousarray(self.mel(samples, self.mel.num_samples)[:, : count + SEEN])
        arrays = {"input_features": features, "num_frames": np.array([count], np.int64)}
        return Processed([self.token] * num_rows, arrays)

    def place_rows(self, modality: str, num_rows: int) -> Processed:
        return Processed([self.token] * num_rows, {})

    def num_rows(self, count: int) -> int:
        """Return the rows of an item with this number of frames that sound."""
        if count < 3:
            raise RequestError(
                f"the audio has {count} frames of {self.mel.hop / self.mel.rate:g} seconds; the "
                "model takes at least 3. Send a longer one"
            )
        return (count + 1) // 4


class AudioFlamingo3Processor(Qwen2AudioProcessor):
    """An item of several windows, of which the last one is padded."""

    audio_token = FLAMINGO_AUDIO_TOKEN
    text = "<sound>"

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(options, setup)
        seconds = processor_values(setup.checkpoint).get("max_audio_len", MAX_SECONDS)
        if type(seconds) is not int or seconds < self.mel.seconds:
            raise ModelError(
                f"processor_config.json has max_audio_len={seconds!r}; expected a whole number of "
                f"seconds, at least {self.mel.seconds}. Correct it"
            )
        self.num_windows = seconds // self.mel.seconds

    def process(
        self, modality: str, value: tuple[np.ndarray, int], options: Mapping[str, Any]
    ) -> Processed:
        """The arrays are input_features, float32 [windows, mel bins, frames], and num_frames, int64
        [windows], of those that sound. Raises RequestError for audio that is too short for a row.
        """
        refuse_options(options)
        size = self.mel.num_samples
        samples = resample(*value, self.mel.rate)[: self.num_windows * size]
        windows = [samples[start : start + size] for start in range(0, len(samples), size)]
        frames = [self.mel.num_frames(window) for window in windows]
        num_rows = self.num_rows(sum(frames))
        features = np.stack([self.mel(window, size) for window in windows])
        arrays = {"input_features": features, "num_frames": np.array(frames, np.int64)}
        return Processed([self.token] * num_rows, arrays)
